"""Every error this package raises on purpose."""

from __future__ import annotations


class KernelError(Exception):
    """Base of all errors of this package."""


class InvalidInput(KernelError, ValueError):
    """An argument has a wrong shape, dtype, device or value; nothing was computed."""


class BackendUnavailable(KernelError, RuntimeError):
    """The backend asked for cannot run here."""


def require(condition: object, message: str) -> None:
    """Check an argument. Raises InvalidInput when the condition is false."""
    if not condition:
        raise InvalidInput(message)
