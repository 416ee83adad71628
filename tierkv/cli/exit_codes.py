"""What the exit status of a command means; the same for all commands."""

from __future__ import annotations

from enum import IntEnum

from tierkv.errors import ConfigError, CorruptionError, NotReady, TierkvError, Unavailable


class Exit(IntEnum):
    """Exit statuses. 75 and 78 are EX_TEMPFAIL and EX_CONFIG of sysexits.h."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    DAMAGE_FOUND = 4
    DAMAGE_REPAIRED = 5
    NOT_READY = 75
    BAD_CONFIG = 78


_BY_ERROR: tuple[tuple[type[TierkvError], Exit], ...] = (
    (ConfigError, Exit.BAD_CONFIG),
    (Unavailable, Exit.UNREACHABLE),
    (NotReady, Exit.NOT_READY),
    (CorruptionError, Exit.DAMAGE_FOUND),
)


def exit_for(error: TierkvError) -> Exit:
    """The exit status of a command that ended by this error."""
    return next((code for cls, code in _BY_ERROR if isinstance(error, cls)), Exit.FAILED)
