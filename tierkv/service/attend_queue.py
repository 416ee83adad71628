"""Which requests for attention are computed together: a queue that gives out rounds.

A round is one call of the kernel. It is led by the oldest request of the worker whose turn it is,
and all others of the same kind that wait then come along, as far as there is room.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tierkv.core.ids import U32

ROUND_ROWS_MAX = 256
"""Query rows of a round of several requests: so many keep all cores busy, and more of them would
only make each wait for the others."""

TABLE_ENTRIES_MAX = 1 << 22
"""Sequences of a round times the blocks of its longest: bounds the memory of its block table."""


@dataclass(frozen=True)
class Kind:
    """What requests must have in common to be computed by one call.

    The namespace is not in it: those with blocks of one geometry lie in one pool.
    """

    pool: int
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    layout: str
    layer: int
    q_heads: int
    scale: float
    causal: bool
    window: int
    softcap: float


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request, checked: all that a thread needs to compute it, and no state of the daemon.

    tables: [B, longest], padded with 0. seq_lens: [B]. q_indptr: [B + 1]. pool: u8 [slots, bytes].
    The query and the results lie in ``scratch``, at these offsets.
    """

    kind: Kind
    tables: U32
    seq_lens: U32
    q_indptr: U32
    pool: Any
    scratch: mmap.mmap
    q_offset: int
    out_offset: int
    lse_offset: int

    @property
    def rows(self) -> int:
        """Query rows of all sequences."""
        return int(self.q_indptr[-1])


class Queue:
    """Jobs that wait, by worker. The worker that was served longest ago is the next to lead."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, worker: Hashable, job: Job) -> None:
        """Let a worker's job wait. Mutates."""
        self._waiting.setdefault(worker, deque()).append(job)

    def take_round(self) -> list[Job]:
        """The jobs of the next round, the leader first; none if none waits. Mutates."""
        taken = _Round()
        for worker, jobs in list(self._waiting.items()):
            left = deque(job for job in jobs if not taken.admits(job))
            if len(left) < len(jobs):
                # To the end: whoever was not served now is before it the next time.
                del self._waiting[worker]
                if left:
                    self._waiting[worker] = left
        return taken.jobs

    def drop(self, worker: Hashable) -> list[Job]:
        """The worker has gone: forget what it waits for, and return it. Mutates."""
        return list(self._waiting.pop(worker, ()))


class _Round:
    """A round as it fills."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._rows = 0
        self._sequences = 0
        self._longest = 0

    def admits(self, job: Job) -> bool:
        """Take the job if it may come along; returns whether it was taken. Mutates."""
        rows = self._rows + job.rows
        sequences = self._sequences + job.tables.shape[0]
        longest = max(self._longest, job.tables.shape[1])
        if self.jobs and (
            job.kind != self.jobs[0].kind
            or rows > ROUND_ROWS_MAX
            or sequences * longest > TABLE_ENTRIES_MAX
        ):
            return False
        self.jobs.append(job)
        self._rows, self._sequences, self._longest = rows, sequences, longest
        return True
