"""Every error tierkv raises on purpose.

Each class carries one stable ``code``: the same word on the wire, in metric labels and in logs.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TierkvError(Exception):
    """Base of all tierkv errors.

    ``details`` holds plain values (str, int, float) that travel with the error over the socket.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class ConfigError(TierkvError):
    """A configuration value is unknown, malformed or contradicts another one."""

    code = "config"


class InvalidArgument(TierkvError):
    """A well-formed request asks for what cannot be (token id out of range, ...)."""

    code = "invalid_argument"


class NamespaceMismatch(TierkvError):
    """A namespace's geometry or digest differs from what the daemon computes or already knows."""

    code = "namespace_mismatch"


class UnknownNamespace(TierkvError):
    """The request names a namespace that this connection has not opened."""

    code = "unknown_namespace"


class UnknownSequence(TierkvError):
    """The request names a sequence that does not exist (any more)."""

    code = "unknown_sequence"


class NotFound(TierkvError):
    """An operator names what is not there (any more). Nothing was changed."""

    code = "not_found"


class NotOwner(TierkvError):
    """The request names a sequence that belongs to another lease."""

    code = "not_owner"


class NotPermitted(TierkvError):
    """An operator's request from a user to whom it is not granted. Nothing was changed."""

    code = "not_permitted"


class LeaseLost(TierkvError):
    """The daemon no longer knows the lease: its sequences are gone and must be begun again."""

    code = "lease_lost"


class PoolExhausted(TierkvError):
    """A tier cannot make room for a whole batch. Nothing was changed.

    details: ``tier``, ``asked``, ``free``, ``evictable`` (blocks).
    """

    code = "pool_exhausted"


class TierFull(TierkvError):
    """The medium behind a tier refused a write for lack of space (ENOSPC)."""

    code = "tier_full"


class TierFailed(TierkvError):
    """The medium behind a tier failed (EIO, short read, ...)."""

    code = "tier_failed"


class CorruptionError(TierkvError):
    """Bytes at rest do not match their checksum or format. details: ``path``, ``offset``."""

    code = "corruption"


class LimitExceeded(TierkvError):
    """A request passes one of the daemon's limits. details: ``limit``, ``asked``."""

    code = "limit_exceeded"


class NotReady(TierkvError):
    """The daemon is starting, recovering or draining. details: ``state``."""

    code = "not_ready"


class ProtocolError(TierkvError):
    """The peer sent bytes that are not the protocol; the connection is closed."""

    code = "protocol"


class VersionMismatch(ProtocolError):
    """The peer speaks another protocol version. details: ``ours``, ``theirs``."""

    code = "version_mismatch"


class Unavailable(TierkvError):
    """The daemon cannot be reached within the caller's time limit."""

    code = "unavailable"


class InvariantViolation(TierkvError):
    """A programming error: the state contradicts itself. The daemon stops rather than go on."""

    code = "invariant"


def _all_errors(cls: type[TierkvError]) -> list[type[TierkvError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        found.extend(_all_errors(sub))
    return found


def error_from_wire(code: str, message: str, details: dict[str, Any]) -> TierkvError:
    """Rebuild the typed error a peer sent; an unknown code becomes a plain ``TierkvError``."""
    plain = {str(key): value for key, value in details.items() if key != "message"}
    for cls in _all_errors(TierkvError):
        if cls.code == code:
            return cls(message, **plain)
    return TierkvError(f"{code}: {message}", **plain)


def require(condition: object, message: str) -> None:
    """Check an invariant; unlike ``assert`` it stays on under ``python -O``.

    Raises InvariantViolation when the condition is false.
    """
    if not condition:
        raise InvariantViolation(message)
