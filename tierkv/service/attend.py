"""The ``attend`` verb: paged attention in the daemon, for workers that do not run it themselves.

torch is imported in the attention thread at the first request, never before the daemon serves.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierkv.core.ids import U32, Tier
from tierkv.core.planner import Planner
from tierkv.core.spec import DTYPE_BYTES, KVSpec
from tierkv.errors import InvalidArgument, UnknownNamespace
from tierkv.rpc.messages import Attend
from tierkv.service.namespaces import Namespaces
from tierkv.tiers.arena import Arena

LSE_BYTES = 4


@dataclass(frozen=True)
class _Job:
    """All that the thread needs; no state of the daemon."""

    message: Attend
    spec: KVSpec
    tables: U32
    seq_lens: U32
    q_indptr: U32
    pool: Any
    scratch: mmap.mmap


class Attention:
    """Checks requests on the loop, computes them on threads."""

    def __init__(
        self, planner: Planner, namespaces: Namespaces, arenas: Mapping[Tier, Arena], threads: int
    ) -> None:
        self._planner = planner
        self._namespaces = namespaces
        self._arenas = arenas
        self.threads = ThreadPoolExecutor(threads, "tierkv-attend")

    def prepare(self, lease: int, message: Attend, scratch: mmap.mmap) -> _Job:
        """Check a request against the state. Raises InvalidArgument, UnknownSequence, ..."""
        spec = self._namespaces.spec(message.namespace)
        entry = self._planner.state.namespaces.get(message.namespace)
        if spec is None or entry is None:
            raise UnknownNamespace(f"there is no namespace {message.namespace}; open it first")
        seq_lens, q_indptr = _u32(message.seq_lens), _u32(message.q_indptr)
        count = len(message.sequences)
        _check(count > 0, "attend: no sequences")
        _check(len(seq_lens) == count, "attend: seq_lens must have one entry per sequence")
        _check(len(q_indptr) == count + 1, "attend: q_indptr must have one entry more")
        steps = np.diff(q_indptr.astype(np.int64))
        _check(int(q_indptr[0]) == 0 and (steps >= 0).all(), "attend: q_indptr must grow from 0")
        _check((steps <= seq_lens).all(), "attend: a sequence has more queries than tokens")
        _check(0 <= message.layer < spec.layers, f"attend: layer {message.layer} does not exist")
        _check(
            message.q_heads > 0 and message.q_heads % spec.kv_heads == 0,
            f"attend: {message.q_heads} query heads for {spec.kv_heads} KV heads",
        )
        self._check_scratch(message, spec, int(q_indptr[-1]), len(scratch))
        tables = self._tables(lease, message, seq_lens, spec)
        pool = self._arenas[Tier.DEVICE].slots(entry.pool)
        return _Job(message, spec, tables, seq_lens, q_indptr, pool, scratch)

    def close(self) -> None:
        """Wait for the threads to end."""
        self.threads.shutdown()

    def _check_scratch(self, message: Attend, spec: KVSpec, rows: int, scratch: int) -> None:
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

    def _tables(self, lease: int, message: Attend, seq_lens: U32, spec: KVSpec) -> U32:
        slots: list[U32] = []
        for at, local in enumerate(message.sequences):
            sequence = self._planner.sequence(lease, local)
            needed = -(-int(seq_lens[at]) // spec.block_tokens)
            _check(
                sequence.namespace == message.namespace,
                f"attend: sequence {local} is of another namespace",
            )
            _check(not sequence.suspended, f"attend: sequence {local} is suspended")
            _check(
                needed <= len(sequence),
                f"attend: {int(seq_lens[at])} tokens of sequence {local}, which has "
                f"{len(sequence)} blocks",
            )
            slots.append(self._planner.table(sequence).slots[:needed])
        tables = np.zeros((len(slots), max(map(len, slots))), np.uint32)
        for row, used in zip(tables, slots, strict=True):
            row[: len(used)] = used
        return tables


def compute(job: _Job) -> None:
    """Run one request; the result is in the scratch memory. Blocks: for a thread."""
    import torch
    from tierkv_kernels import block_view, paged_attention

    message, spec = job.message, job.spec
    dtype = getattr(torch, spec.dtype)
    rows = int(job.q_indptr[-1])
    shape = (rows, message.q_heads, spec.head_dim)
    size = rows * message.q_heads * spec.head_dim
    q = torch.frombuffer(job.scratch, dtype=dtype, count=size, offset=message.q_offset)
    out = torch.frombuffer(job.scratch, dtype=dtype, count=size, offset=message.out_offset)
    lse = torch.frombuffer(
        job.scratch,
        dtype=torch.float32,
        count=rows * message.q_heads,
        offset=message.lse_offset,
    )
    blocks = block_view(
        torch.from_numpy(job.pool),
        layers=spec.layers,
        block_size=spec.block_tokens,
        num_kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        layout=spec.layout,
    )
    result, result_lse = paged_attention(
        q.view(shape),
        blocks[:, message.layer, 0],
        blocks[:, message.layer, 1],
        torch.from_numpy(job.tables.astype(np.int32)),
        torch.from_numpy(job.seq_lens.astype(np.int32)),
        q_indptr=torch.from_numpy(job.q_indptr.astype(np.int32)),
        scale=message.scale or None,
        causal=message.causal,
        window=message.window,
        softcap=message.softcap,
        return_lse=True,
    )
    out.view(shape).copy_(result)
    if result_lse is not None:
        lse.view(rows, message.q_heads).copy_(result_lse)


def _u32(blob: bytes) -> U32:
    _check(len(blob) % 4 == 0, "attend: a u32 blob has a length that is no multiple of 4")
    return np.frombuffer(blob, "<u4")


def _check(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise InvalidArgument(message)
