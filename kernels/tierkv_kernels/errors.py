"""Every error this package raises on purpose."""

from __future__ import annotations


class KernelError(Exception):
    """Base of all errors of this package."""


class InvalidInput(KernelError, ValueError):
    """An argument has a wrong shape, dtype, device or value; nothing was computed."""


class BackendUnavailable(KernelError, RuntimeError):
    """The backend asked for cannot run here."""


class DriverError(KernelError, RuntimeError):
    """A call of the CUDA driver failed.

    call: the C function. code: its CUresult, whose name is ``name`` and whose meaning ``text``.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call, self.code, self.name, self.text = call, code, name, text


class CompileError(KernelError, RuntimeError):
    """The compiler refused a kernel; the message ends with its log."""


def require(condition: object, message: str) -> None:
    """Check an argument. Raises InvalidInput when the condition is false."""
    if not condition:
        raise InvalidInput(message)
