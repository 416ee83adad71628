"""Every error the log raises on purpose. I/O errors are passed on as the OSError they are."""

from __future__ import annotations


class WalError(Exception):
    """Base of all errors of this package."""


class WalMisuse(WalError):
    """A call that the protocol of reader and writer does not allow at this point."""


class WalVersion(WalError):
    """A segment was written by a newer, incompatible version. Nothing was changed."""


class WalCorrupt(WalError):
    """The log cannot be continued because it is corrupt; ``WalReader.end`` says where and why."""


class WalDead(WalError):
    """An earlier write or sync failed, so nothing is known about later ones.

    A page whose writeback failed is marked clean: a second sync succeeds and the data are gone.
    The only way on is a new process that recovers.
    """
