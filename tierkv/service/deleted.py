"""What was deleted, for those who make an index anew from what slots say of themselves.

Slots that blocks have left still name them, on disk and in memory, until others come. An index that
is lost takes its knowledge of what was deleted with it. So each deletion is first written here:

    offset  size  field
    0       16    digest   of the namespace; all zeroes = of each
    16      16    name     chain hash of the block with which all that follows it was deleted; all
                           zeroes = every block of the namespace
    32      8     before   blocks of this id and above came later, and are none of these
    40      8     check    xxh3_64 of the 40 bytes before

in the file DELETED of the state directory, one entry after the other.

Crash: an entry is durable before the log hears of any block that goes. Dying in between, the index
keeps the blocks, as nobody was told that they are gone; made anew, it does not have them. An entry
that was not written whole is the last one, and the next takes its place.

A file that is damaged can no longer tell the others from what was deleted. Then whoever needs it
replaces it by one that says that all was (see ``recovery``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash
from tierkv_wal import Storage

from tierkv.errors import CorruptionError

NAME = "DELETED"

ENTRY_BYTES = 48


@dataclass(frozen=True)
class Deletion:
    """One entry. ``name`` is empty if it is about the whole namespace, ``digest`` if about all."""

    digest: bytes
    name: bytes
    before: int

    def encode(self) -> bytes:
        """The entry's bytes."""
        body = self.digest + self.name.ljust(16, b"\0") + self.before.to_bytes(8, "little")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


class DeletedFile:
    """The file in a state directory, whether it is there yet or not. Its calls block."""

    def __init__(self, state_dir: Path, storage: Storage) -> None:
        self.path = state_dir / NAME
        self._storage = storage

    def read(self) -> list[Deletion]:
        """All entries. Raises CorruptionError if one is damaged that is not the last, OSError."""
        data = self._bytes()
        whole = len(data) // ENTRY_BYTES * ENTRY_BYTES
        entries = [data[at : at + ENTRY_BYTES] for at in range(0, whole, ENTRY_BYTES)]
        found = []
        for number, entry in enumerate(entries):
            deletion = Deletion(
                entry[:16],
                entry[16:32] if any(entry[16:32]) else b"",
                int.from_bytes(entry[32:40], "little"),
            )
            if deletion.encode() == entry:
                found.append(deletion)
            elif number < len(entries) - 1 or whole < len(data):
                raise CorruptionError(
                    f"{self.path} is damaged at byte {number * ENTRY_BYTES}: an index that is made "
                    "anew would keep no block, and nothing more can be deleted; move the file "
                    "aside if what was deleted may come back then",
                    path=str(self.path),
                    offset=number * ENTRY_BYTES,
                )
        return found

    def add(self, deletions: list[Deletion]) -> None:
        """Add entries, durably. Raises CorruptionError, OSError: then they may be there or not."""
        at = len(self.read()) * ENTRY_BYTES
        storage = self._storage
        fd = storage.open(str(self.path), create=True)
        try:
            storage.fsync_dir(str(self.path.parent))
            for one in deletions:
                # Each by itself, so that only the last one of all may be there by half.
                storage.pwrite(fd, one.encode(), at)
                storage.fdatasync(fd)
                at += ENTRY_BYTES
        finally:
            storage.close(fd)

    def _bytes(self) -> bytes:
        try:
            fd = self._storage.open(str(self.path), writable=False)
        except FileNotFoundError:
            return b""
        try:
            return self._storage.pread(fd, self._storage.size(str(self.path)), 0)
        finally:
            self._storage.close(fd)
