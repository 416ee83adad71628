"""How the disk tier reads and writes: chosen once, when it is opened."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from tierkv.errors import ConfigError
from tierkv.tiers.linux import takes_direct_io
from tierkv.tiers.reads import Reads, SerialReads, ThreadReads
from tierkv.tiers.storage import BlockStorage
from tierkv.tiers.uring import RingReads
from tierkv.tiers.writes import SerialWrites, ThreadWrites, Writes

log = logging.getLogger(__name__)

READERS = 2
"""Requests that read at the same time."""

THREADS = 4
"""Threads that share the reads of all requests where there is no io_uring."""

WRITERS = 3
"""Threads that share the writes of all requests: one checks while the device has two to do."""

ReadBy = Literal["auto", "uring", "threads"]
Direct = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class DiskIO:
    """``reads`` and ``writes`` carry out; ``direct``: both go past the page cache."""

    reads: Reads
    writes: Writes
    direct: bool

    @property
    def description(self) -> str:
        """For people: "io_uring, direct"."""
        return f"{self.reads.name}, {'direct' if self.direct else 'through the page cache'}"

    def close(self) -> None:
        """Give threads and descriptors back."""
        self.reads.close()
        self.writes.close()


def serial_io(storage: BlockStorage, directory: str) -> DiskIO:
    """One thing after the other through the page cache: for storage that is no real one."""
    return DiskIO(SerialReads(storage), SerialWrites(), direct=False)


def open_disk_io(
    storage: BlockStorage, directory: str, *, read_by: ReadBy, direct: Direct
) -> DiskIO:
    """The best there is for the files in a directory, or what is asked for.

    ``storage`` must be of the operating system's own files. Raises ConfigError if what is asked
    for is not to be had.
    """
    goes_direct = direct != "off" and takes_direct_io(directory)
    if direct == "on" and not goes_direct:
        raise ConfigError(
            f'disk.direct is "on", but files in {directory} cannot be read past the page cache'
            " (O_DIRECT)"
        )
    return DiskIO(_open_reads(storage, read_by), ThreadWrites(WRITERS), goes_direct)


def _open_reads(storage: BlockStorage, read_by: ReadBy) -> Reads:
    if read_by != "threads":
        try:
            return RingReads(storage, READERS)
        except OSError as error:
            if read_by == "uring":
                raise ConfigError(f'disk.io is "uring", but there is none: {error}') from error
            words = "no io_uring (%s): %d threads read from disk"
            log.info(words, error, THREADS, extra={"tier": "disk"})
    return ThreadReads(storage, THREADS)
