"""One round of attention, on a thread: the kernel's call, its input and its results.

torch is imported at the first round, never before the daemon serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from tierkv_kernels import Plan, plan

from tierkv.core.ids import I32, U32
from tierkv.errors import InvalidArgument, TierkvError
from tierkv.service.attend_queue import Job, Kind

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class Computer:
    """What the threads do. Each keeps its last plan: a model's layers ask one after another."""

    def __init__(self) -> None:
        self._last = threading.local()

    def run(self, jobs: Sequence[Job]) -> list[TierkvError | None]:
        """Compute a round; the results are in the jobs' scratch memory. Blocks: for a thread.

        Returns what became of each job: an error, or None. If the round fails, each of its jobs is
        computed alone, so that only those fail that would have failed by themselves.
        """
        error = self._attempt(jobs)
        if error is None or len(jobs) == 1:
            return [error] * len(jobs)
        return [self._attempt([job]) for job in jobs]

    def _attempt(self, jobs: Sequence[Job]) -> TierkvError | None:
        try:
            seq_lens = np.concatenate([job.seq_lens for job in jobs]).astype(np.int32)
            q_lens = np.concatenate([np.diff(job.q_indptr) for job in jobs]).astype(np.int32)
            _compute(jobs, seq_lens, q_lens, self._plan(jobs[0].kind, seq_lens, q_lens))
        except (ValueError, TypeError, RuntimeError) as error:
            return InvalidArgument(f"attend: {error}")
        except Exception as error:  # it touches no state, so only these requests fail
            kind = jobs[0].kind
            log.exception(
                "attend failed",
                extra={"pool": kind.pool, "layer": kind.layer, "requests": len(jobs)},
            )
            return TierkvError(f"attend: {error!r}")
        return None

    def _plan(self, kind: Kind, seq_lens: I32, q_lens: I32) -> Plan:
        """The plan of these lengths, whichever layer it is for.

        Unsplit: so a result does not depend, bit for bit, on what else is computed in the round,
        and needs no memory for parts, which is rows times chunks: gigabytes for a long prefill.
        """
        key = (replace(kind, layer=0), seq_lens.tobytes(), q_lens.tobytes())
        if getattr(self._last, "key", None) != key:
            self._last.plan = plan(
                seq_lens,
                q_lens,
                num_q_heads=kind.q_heads,
                num_kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
                block_size=kind.block_tokens,
                split=0,
                causal=kind.causal,
                window=kind.window,
            )
            self._last.key = key
        last: Plan = self._last.plan
        return last


def _compute(jobs: Sequence[Job], seq_lens: I32, q_lens: I32, planned: Plan) -> None:
    import torch
    from tierkv_kernels import block_view, paged_attention

    kind = jobs[0].kind
    dtype = getattr(torch, kind.dtype)
    blocks = block_view(
        torch.from_numpy(jobs[0].pool),
        layers=kind.layers,
        block_size=kind.block_tokens,
        num_kv_heads=kind.kv_heads,
        head_dim=kind.head_dim,
        dtype=dtype,
        layout=kind.layout,
    )
    queries = [_rows(job, job.q_offset, dtype) for job in jobs]
    alone = len(jobs) == 1
    out, lse = paged_attention(
        queries[0] if alone else torch.cat(queries),
        blocks[:, kind.layer, 0],
        blocks[:, kind.layer, 1],
        torch.from_numpy(_joined([job.tables for job in jobs])),
        torch.from_numpy(seq_lens),
        q_indptr=torch.from_numpy(np.cumsum(np.append(0, q_lens), dtype=np.int32)),
        plan=planned,
        scale=kind.scale or None,
        causal=kind.causal,
        window=kind.window,
        softcap=kind.softcap,
        out=_rows(jobs[0], jobs[0].out_offset, dtype) if alone else None,
        return_lse=True,
    )
    bounds = np.cumsum([0, *(job.rows for job in jobs)]).tolist()
    for job, (first, end) in zip(jobs, pairwise(bounds), strict=True):
        if not alone:
            _rows(job, job.out_offset, dtype).copy_(out[first:end])
        if lse is not None:
            _sums(job).copy_(lse[first:end])


def _rows(job: Job, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """Scratch memory as [rows, q_heads, head_dim]."""
    import torch

    shape = (job.rows, job.kind.q_heads, job.kind.head_dim)
    flat = torch.frombuffer(job.scratch, dtype=dtype, count=int(np.prod(shape)), offset=offset)
    return flat.view(shape)


def _sums(job: Job) -> torch.Tensor:
    """Where the log-sum-exps go: [rows, q_heads] float32."""
    import torch

    shape = (job.rows, job.kind.q_heads)
    count = shape[0] * shape[1]
    flat = torch.frombuffer(job.scratch, dtype=torch.float32, count=count, offset=job.lse_offset)
    return flat.view(shape)


def _joined(tables: Sequence[U32]) -> I32:
    """The block tables one above the other, padded with 0."""
    joined = np.zeros((sum(map(len, tables)), max(table.shape[1] for table in tables)), np.int32)
    row = 0
    for table in tables:
        joined[row : row + len(table), : table.shape[1]] = table
        row += len(table)
    return joined
