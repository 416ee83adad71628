"""Many reads of files at once, behind one interface: ``Reads``.

``SerialReads`` and ``ThreadReads`` are here; ``uring`` has the one that asks the kernel's ring.
What is read may be looked at while the rest is still on its way.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np

from tierkv.core.ids import I64, U64
from tierkv.tiers.pieces import buffers_of
from tierkv.tiers.storage import BlockStorage


@dataclass(frozen=True, slots=True)
class ReadList:
    """Reads of files: number r takes ``fds[r]`` from byte ``offsets[r]`` on (both shape [n]).

    It fills ``counts[r]`` (i64 [n], 1 at least) of the ``pieces`` of memory, one after the other.
    """

    fds: I64
    offsets: I64
    counts: I64
    pieces: U64

    def firsts(self) -> I64:
        """Where each read's pieces begin, shape [n]."""
        return np.cumsum(self.counts) - self.counts

    def sizes(self) -> I64:
        """How many bytes each read takes, shape [n]."""
        if not len(self.counts):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.pieces[:, 1].astype(np.int64), self.firsts())


class Done(NamedTuple):
    """Reads that are done: their ``numbers``, and how many bytes each ``got`` (both i64 [n]).

    Fewer bytes than asked for come only from the end of a file. A negative number is an errno: the
    read was refused.
    """

    numbers: I64
    got: I64


Batches = Generator[Done, None, None]


class Reads(Protocol):
    """Reads on behalf of the disk tier. ``name``: how, for people.

    Threads: any thread may call ``read`` at any time; ``close`` comes after all else.
    """

    name: str

    def read(self, reads: ReadList) -> Batches:
        """Carry the reads out, in any order; yields those that are done, a few at a time.

        The memory belongs to the operating system until the generator has ended. Closing it early
        waits for what has begun.
        """
        ...

    def close(self) -> None:
        """Give threads and descriptors back."""


class SerialReads:
    """One read after the other, in the thread that asks."""

    name = "one by one"

    def __init__(self, storage: BlockStorage) -> None:
        self._storage = storage

    def read(self, reads: ReadList) -> Batches:
        """See Reads."""
        for number in range(len(reads.fds)):
            yield _done([(number, plain_read(self._storage, reads, number))])

    def close(self) -> None:
        """Nothing to give back."""


class ThreadReads:
    """A few threads share the reads of each request."""

    def __init__(self, storage: BlockStorage, threads: int) -> None:
        self.name = f"{threads} threads"
        self._storage = storage
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "tierkv-preadv")

    def read(self, reads: ReadList) -> Batches:
        """See Reads."""
        turns = _Turns(len(reads.fds))
        done: SimpleQueue[_Word] = SimpleQueue()
        working = [
            self._pool.submit(_work, self._storage, reads, turns, done)
            for _ in range(self._threads)
        ]
        try:
            left = len(working)
            while left:
                batch, ended = _all_of(done)
                left -= ended
                yield _done(batch)
        finally:
            turns.end()
            wait(working)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _Turns:
    """Numbers of reads, each given to one of several threads."""

    def __init__(self, count: int) -> None:
        self._left = iter(range(count))
        self._taking = threading.Lock()
        self._ended = False

    def take(self) -> int | None:
        """The next one, None if there are no more."""
        with self._taking:
            return None if self._ended else next(self._left, None)

    def end(self) -> None:
        """Give no more out."""
        with self._taking:
            self._ended = True


_Word = tuple[int, int] | BaseException | None
"""A read that is done and what it got; or that a thread has ended, and by which error if any."""


def _work(storage: BlockStorage, reads: ReadList, turns: _Turns, done: SimpleQueue[_Word]) -> None:
    """Read what is left; says None at the end, or the error that ended it."""
    try:
        while (number := turns.take()) is not None:
            done.put((number, plain_read(storage, reads, number)))
        done.put(None)
    except BaseException as error:  # for whoever waits; without it he would for ever
        done.put(error)


def _all_of(done: SimpleQueue[_Word]) -> tuple[list[tuple[int, int]], int]:
    """What is in the queue, at least one word, and how many threads have ended.

    Raises the error that a thread has met.
    """
    batch: list[tuple[int, int]] = []
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


def _done(batch: list[tuple[int, int]]) -> Done:
    pairs = np.array(batch, np.int64).reshape(-1, 2)
    return Done(pairs[:, 0], pairs[:, 1])


def plain_read(storage: BlockStorage, reads: ReadList, number: int) -> int:
    """Carry one read out here and now; what it got, as ``Done`` has it."""
    first = int(reads.counts[:number].sum())
    buffers = buffers_of(reads.pieces[first : first + int(reads.counts[number])])
    try:
        return storage.preadv(int(reads.fds[number]), buffers, int(reads.offsets[number]))
    except OSError as error:
        return -(error.errno or errno.EIO)
