"""Many reads of files at once, behind one interface: ``Reads``.

``SerialReads`` and ``ThreadReads`` are here; ``uring`` has the one that asks the kernel's ring.
What is read may be looked at while the rest is still on its way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from tierkv.tiers.storage import BlockStorage, Buffers


class Read(NamedTuple):
    """Bytes of a file, from ``offset`` on, that fill the buffers one after the other."""

    fd: int
    offset: int
    buffers: Buffers


Done = tuple[int, int | OSError]
"""Which read of a request is done, and how many bytes it got or why it was refused.

Fewer bytes than the buffers take come only from the end of a file.
"""

Batches = Generator[list[Done], None, None]


class Reads(Protocol):
    """Reads on behalf of the disk tier. ``name``: how, for people.

    Threads: any thread may call ``read`` at any time; ``close`` comes after all else.
    """

    name: str

    def read(self, reads: Iterable[Read]) -> Batches:
        """Carry the reads out, in any order; yields those that are done, a few at a time.

        A read is taken from ``reads`` (by any thread) when it is its turn. The buffers belong to
        the operating system until the generator has ended. Closing it early waits for what has
        begun.
        """
        ...

    def close(self) -> None:
        """Give threads and descriptors back."""


class SerialReads:
    """One read after the other, in the thread that asks."""

    name = "one by one"

    def __init__(self, storage: BlockStorage) -> None:
        self._storage = storage

    def read(self, reads: Iterable[Read]) -> Batches:
        """See Reads."""
        for at, read in enumerate(reads):
            yield [(at, plain_read(self._storage, read))]

    def close(self) -> None:
        """Nothing to give back."""


class ThreadReads:
    """A few threads share the reads of each request."""

    def __init__(self, storage: BlockStorage, threads: int) -> None:
        self.name = f"{threads} threads"
        self._storage = storage
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "tierkv-preadv")

    def read(self, reads: Iterable[Read]) -> Batches:
        """See Reads."""
        turns = _Turns(reads)
        done: SimpleQueue[Done | BaseException | None] = SimpleQueue()
        working = [
            self._pool.submit(_work, self._storage, turns, done) for _ in range(self._threads)
        ]
        try:
            left = len(working)
            while left:
                batch, ended = _all_of(done)
                left -= ended
                yield batch
        finally:
            turns.end()
            wait(working)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _Turns:
    """Reads that several threads take from one iterator."""

    def __init__(self, reads: Iterable[Read]) -> None:
        self._reads = enumerate(reads)
        self._taking = threading.Lock()
        self._ended = False

    def take(self) -> tuple[int, Read] | None:
        """The next one, None if there are no more."""
        with self._taking:
            return None if self._ended else next(self._reads, None)

    def end(self) -> None:
        """Give no more out."""
        with self._taking:
            self._ended = True


def _work(
    storage: BlockStorage, turns: _Turns, done: SimpleQueue[Done | BaseException | None]
) -> None:
    """Read what is left; says None at the end, or the error that ended it."""
    try:
        while (turn := turns.take()) is not None:
            done.put((turn[0], plain_read(storage, turn[1])))
        done.put(None)
    except BaseException as error:  # for whoever waits; without it he would for ever
        done.put(error)


def _all_of(done: SimpleQueue[Done | BaseException | None]) -> tuple[list[Done], int]:
    """What is in the queue, at least one word, and how many threads have ended.

    Raises the error that a thread has met.
    """
    batch: list[Done] = []
    ended = 0
    word = done.get()
    with contextlib.suppress(Empty):
        while True:
            if isinstance(word, BaseException):
                raise word
            if word is None:
                ended += 1
            else:
                batch.append(word)
            word = done.get_nowait()
    return batch, ended


def plain_read(storage: BlockStorage, read: Read) -> int | OSError:
    """Carry one read out here and now."""
    try:
        return storage.preadv(read.fd, read.buffers, read.offset)
    except OSError as error:
        return error
