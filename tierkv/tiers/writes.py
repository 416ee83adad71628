"""Who carries out the pieces of a write to the disk tier: as an interface that simulation replaces.

A piece is checked and then written. While the device has one, the next one is checked: so it need
never wait for the processor, nor the processor for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

P = TypeVar("P")
R = TypeVar("R")


class Writes(Protocol):
    """Threads: any thread may call ``each`` at any time; ``close`` comes after all else."""

    def each(self, job: Callable[[P], R], pieces: Iterable[P]) -> list[R]:
        """What the job makes of each piece, in their order; begun in that order, some at once.

        Returns when all have ended. Raises what the job raises.
        """
        ...

    def close(self) -> None:
        """Give threads back."""


class SerialWrites:
    """One piece after the other, in the thread that asks."""

    def each(self, job: Callable[[P], R], pieces: Iterable[P]) -> list[R]:
        """See Writes."""
        return [job(piece) for piece in pieces]

    def close(self) -> None:
        """Nothing to give back."""


class ThreadWrites:
    """A few threads share the pieces of all requests.

    They are made when the first pieces come, and have the priority of the thread that brings them.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "tierkv-pwritev")

    def each(self, job: Callable[[P], R], pieces: Iterable[P]) -> list[R]:
        """See Writes. One piece alone is left to the thread that asks."""
        pieces = list(pieces)
        if len(pieces) == 1:
            return [job(pieces[0])]
        begun = [self._pool.submit(job, piece) for piece in pieces]
        wait(begun)
        return [piece.result() for piece in begun]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
