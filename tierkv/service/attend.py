"""The ``attend`` verb: paged attention in the daemon, for workers that do not run it themselves.

A request that finds a thread idle is computed at once. While the threads compute, requests wait,
and those of one kind are then computed together, whichever workers they are from.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierkv.core.arrays import every
from tierkv.core.effects import Flow, Signal, Wait
from tierkv.core.ids import U32, Tier, lease_of
from tierkv.core.planner import Planner
from tierkv.core.sequences import LOCAL_MAX
from tierkv.core.spec import DTYPE_BYTES, KVSpec
from tierkv.core.state import Sequence
from tierkv.errors import InvalidArgument, LimitExceeded, TierkvError, UnknownNamespace
from tierkv.rpc.messages import Attend, Done
from tierkv.service.attend_compute import Computer
from tierkv.service.attend_queue import TABLE_ENTRIES_MAX, Job, Kind, Queue
from tierkv.service.namespaces import Namespaces
from tierkv.tiers.arena import Arena

LSE_BYTES = 4

Answer = Callable[[Done | TierkvError], None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who is to hear of a job, which sequences it reads (once each), and when it came."""

    answer: Answer
    sequences: frozenset[int]
    came_s: float


class Attention:
    """Checks requests, lets them wait, and gives rounds of them to its threads.

    All of it belongs to the event loop, but what the threads run.
    """

    def __init__(
        self, planner: Planner, namespaces: Namespaces, arenas: Mapping[Tier, Arena], threads: int
    ) -> None:
        self._planner = planner
        self._namespaces = namespaces
        self._arenas = arenas
        self._threads = ThreadPoolExecutor(threads, "tierkv-attend")
        self._computer = Computer()
        self._idle = threads
        self._rounds: set[asyncio.Future[list[TierkvError | None]]] = set()
        self._queue = Queue()
        self._asked: dict[Job, _Asked] = {}
        self._read: Counter[int] = Counter()
        """Sequences whose blocks a request reads or will, and how many requests do."""
        self._over = Signal()
        """Set when any request is over next."""
        self.on_round: Callable[[list[float]], None] = lambda _waited_s: None

    def start(
        self, worker: Hashable, lease: int, message: Attend, scratch: mmap.mmap, answer: Answer
    ) -> None:
        """Compute a request of a worker now or later, and answer it. Mutates.

        Raises InvalidArgument, UnknownSequence, UnknownNamespace, LimitExceeded.
        """
        job, sequences = self._checked(lease, message, scratch)
        self._asked[job] = _Asked(answer, sequences, time.monotonic())
        self._read.update(sequences)
        self._queue.put(worker, job)
        self._next_rounds()

    @property
    def reading(self) -> bool:
        """Whether any request reads blocks or waits for its turn to."""
        return bool(self._read)

    def drop(self, worker: Hashable) -> None:
        """The worker has gone: what it asked for is not begun any more. Mutates."""
        for job in self._queue.drop(worker):
            self._forget(job)

    def finished(self, lease: int, sequences: Collection[int] | None = None) -> Flow[None]:
        """Return when no request reads the blocks of these sequences of a lease; None: of all."""
        local = None if sequences is None else {one & (LOCAL_MAX - 1) for one in sequences}
        while any(
            lease_of(one) == lease and (local is None or one & (LOCAL_MAX - 1) in local)
            for one in self._read
        ):
            yield Wait(self._over)

    async def close(self) -> None:
        """Wait for what is computed now. By then no worker is connected, so nothing else waits."""
        while self._rounds:
            await asyncio.wait(self._rounds)
        self._threads.shutdown()

    # --- rounds -----------------------------------------------------------------------------------

    def _next_rounds(self) -> None:
        while self._idle and (jobs := self._queue.take_round()):
            self._idle -= 1
            now_s = time.monotonic()
            self.on_round([now_s - self._asked[job].came_s for job in jobs])
            loop = asyncio.get_running_loop()
            computed = loop.run_in_executor(self._threads, self._computer.run, jobs)
            self._rounds.add(computed)
            computed.add_done_callback(partial(self._computed, jobs))

    def _computed(
        self, jobs: list[Job], computed: asyncio.Future[list[TierkvError | None]]
    ) -> None:
        self._rounds.discard(computed)
        self._idle += 1
        self._next_rounds()  # before the answers: the threads need not wait for them
        for job, error in zip(jobs, computed.result(), strict=True):
            answer = self._asked[job].answer
            self._forget(job)
            answer(Done() if error is None else error)

    def _forget(self, job: Job) -> None:
        """The job reads nothing any more. Mutates."""
        asked = self._asked.pop(job)
        self._read.subtract(asked.sequences)
        for sequence in asked.sequences:
            if not self._read[sequence]:
                del self._read[sequence]
        over, self._over = self._over, Signal()
        over.set()

    # --- checks -----------------------------------------------------------------------------------

    def _checked(
        self, lease: int, message: Attend, scratch: mmap.mmap
    ) -> tuple[Job, frozenset[int]]:
        """The job of a request that the state allows, and the sequences that it reads."""
        _check(
            self._arenas[Tier.DEVICE].on_gpu is None,
            'attend: the device tier is on a GPU; compute in the worker, by where="worker"',
        )
        spec = self._namespaces.spec(message.namespace)
        entry = self._planner.state.namespaces.get(message.namespace)
        if spec is None or entry is None:
            raise UnknownNamespace(f"there is no namespace {message.namespace}; open it first")
        spec.require_plain()
        seq_lens, q_indptr = _u32(message.seq_lens), _u32(message.q_indptr)
        _check_lengths(len(message.sequences), seq_lens, q_indptr)
        _check(0 <= message.layer < spec.layers, f"attend: layer {message.layer} does not exist")
        _check(
            message.q_heads > 0 and message.q_heads % spec.kv_heads == 0,
            f"attend: {message.q_heads} query heads for {spec.kv_heads} KV heads",
        )
        _check_scratch(message, spec, int(q_indptr[-1]), len(scratch))
        sequences = [self._planner.sequence(lease, local) for local in message.sequences]
        tables = self._tables(message.namespace, sequences, seq_lens, spec.block_tokens)
        job = Job(
            kind=_kind(entry.pool, spec, message),
            tables=tables,
            seq_lens=seq_lens,
            q_indptr=q_indptr,
            pool=self._arenas[Tier.DEVICE].slots(entry.pool),
            scratch=scratch,
            q_offset=message.q_offset,
            out_offset=message.out_offset,
            lse_offset=message.lse_offset,
        )
        return job, frozenset(sequence.id for sequence in sequences)

    def _tables(
        self, namespace: int, sequences: list[Sequence], seq_lens: U32, block_tokens: int
    ) -> U32:
        """Their block tables as far as they are read, padded with 0."""
        needed = -(-seq_lens.astype(np.int64) // block_tokens)
        blocks = self._planner.state.blocks
        for sequence, count in zip(sequences, needed.tolist(), strict=True):
            local = sequence.id & (LOCAL_MAX - 1)
            _check(
                sequence.namespace == namespace,
                f"attend: sequence {local} is of another namespace",
            )
            _check(not sequence.suspended, f"attend: sequence {local} is suspended")
            _check(
                count <= len(sequence),
                f"attend: {count} blocks of sequence {local}, which has {len(sequence)}",
            )
            _check(
                every(blocks.has_copy(sequence.rows[:count], Tier.DEVICE)),
                f"attend: sequence {local} is still coming up; wait for its blocks first",
            )
        entries = len(sequences) * int(needed.max())
        if entries > TABLE_ENTRIES_MAX:
            raise LimitExceeded(
                f"attend: {len(sequences)} sequences of up to {int(needed.max())} blocks make a "
                f"table of {entries} entries; the limit is {TABLE_ENTRIES_MAX}: ask for fewer "
                "sequences at a time",
                limit=TABLE_ENTRIES_MAX,
                asked=entries,
            )
        tables = np.zeros((len(sequences), int(needed.max())), np.uint32)
        for row, sequence, count in zip(tables, sequences, needed.tolist(), strict=True):
            row[:count] = self._planner.table(sequence).slots[:count]
        return tables


def _kind(pool: int, spec: KVSpec, message: Attend) -> Kind:
    return Kind(
        pool=pool,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=spec.block_tokens,
        dtype=spec.dtype,
        layout=spec.layout,
        layer=message.layer,
        q_heads=message.q_heads,
        scale=message.scale,
        causal=message.causal,
        window=message.window,
        softcap=message.softcap,
    )


def _check_lengths(count: int, seq_lens: U32, q_indptr: U32) -> None:
    _check(count > 0, "attend: no sequences")
    _check(len(seq_lens) == count, "attend: seq_lens must have one entry per sequence")
    _check(len(q_indptr) == count + 1, "attend: q_indptr must have one entry more")
    steps = np.diff(q_indptr.astype(np.int64))
    _check(int(q_indptr[0]) == 0 and (steps >= 0).all(), "attend: q_indptr must grow from 0")
    _check((steps <= seq_lens).all(), "attend: a sequence has more queries than tokens")
    _check(int(q_indptr[-1]) > 0, "attend: no query rows")


def _check_scratch(message: Attend, spec: KVSpec, rows: int, scratch: int) -> None:
    item = DTYPE_BYTES[spec.dtype]
    size = rows * message.q_heads * spec.head_dim * item
    areas = (
        ("q", message.q_offset, size, item),
        ("out", message.out_offset, size, item),
        ("lse", message.lse_offset, rows * message.q_heads * LSE_BYTES, LSE_BYTES),
    )
    for name, offset, length, align in areas:
        _check(
            offset >= 0 and offset % align == 0 and offset + length <= scratch,
            f"attend: {name} at {offset} with {length} bytes does not fit the scratch memory "
            f"of {scratch} bytes",
        )


def _u32(blob: bytes) -> U32:
    _check(len(blob) % 4 == 0, "attend: a u32 blob has a length that is no multiple of 4")
    return np.frombuffer(blob, "<u4")


def _check(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise InvalidArgument(message)
