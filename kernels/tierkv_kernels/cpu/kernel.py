"""The "cpu" backend: the compiled kernel, its threads, and calls to it."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierkv_kernels.call import FP8, Call, check_shared_prefixes, check_table
from tierkv_kernels.cpu.library import BAD_TABLE, NO_MEMORY, Attention, Cache, Library, choose_level
from tierkv_kernels.errors import BackendUnavailable, require

HEAD_DIM_STEP, HEAD_DIM_MAX = 16, 256
"""The kernel's head dims: multiples of the one up to the other."""

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, FP8: 3}


def can_run(call: Call) -> bool:
    """Whether the kernel is made for this head_dim."""
    head_dim = call.plan.head_dim
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= HEAD_DIM_MAX


class Kernel:
    """The kernel at one level, with a pool of threads that start with the first large call.

    Any number of Python threads may call; they take turns. The child of a fork gets threads of its
    own. The pool's threads end with the kernel, or with the process.
    """

    def __init__(
        self,
        level: str | None = None,
        threads: int | None = None,
        *,
        library: Library | None = None,
    ) -> None:
        """level: an instruction set, as ``levels()`` names them; None: the one that TIERKV_ISA
        names, else the fastest. threads: the caller's included; None: one per CPU that the process
        may use. library: None: the one that was built with the package.

        Raises BackendUnavailable.
        """
        if threads is None:
            threads = len(os.sched_getaffinity(0))
        require(threads >= 1, f"threads: got {threads}, want at least 1")
        library = library or Library()
        environ = os.environ if level is None else {"TIERKV_ISA": level}
        self.level = choose_level(library, environ)
        self.threads = threads
        self._attention = library.attention(self.level)
        self._read = library.read(self.level)
        self._pool = library.pool_new(threads)
        if not self._pool:
            raise MemoryError("no memory for a pool of threads")
        finalizer = weakref.finalize(self, library.pool_free, self._pool)
        finalizer.atexit = False  # a thread may be in a call until the very end
        _renew_after_fork(finalizer, library, self._pool)

    def run(self, call: Call) -> None:
        """Fill ``call.out`` and ``call.lse``.

        Raises InvalidInput for a bad block table, BackendUnavailable for another head_dim.
        """
        plan, q, out, table = call.plan, call.q, call.out, call.block_table
        if not can_run(call):
            raise BackendUnavailable(
                f'backend: the "cpu" kernel takes a head_dim that is a multiple of {HEAD_DIM_STEP} '
                f'up to {HEAD_DIM_MAX}, got {plan.head_dim}; use "torch" or "auto"'
            )
        if plan.shared_prefix:
            check_shared_prefixes(table.numpy(), plan)
        if table.stride(1) != 1:
            table = table.contiguous()
        arguments = Attention(
            q=q.data_ptr(),
            out=out.data_ptr(),
            lse=None if call.lse is None else call.lse.data_ptr(),
            k=_cache(call.k_cache),
            v=_cache(call.v_cache),
            block_table=table.data_ptr(),
            seq_lens=plan.seq_lens.ctypes.data,
            records=plan.records.ctypes.data,
            merge_tokens=plan.merge_tokens.ctypes.data,
            merge_indptr=plan.merge_indptr.ctypes.data,
            merge_rows=plan.merge_rows.ctypes.data,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            out_stride=out.stride(0),
            out_head_stride=out.stride(1),
            table_stride=table.stride(0),
            num_blocks=call.k_cache.shape[0],
            num_sequences=len(plan.seq_lens),
            num_records=len(plan.records),
            num_merges=len(plan.merge_tokens),
            num_partials=plan.num_partials,
            q_type=_TYPES[q.dtype],
            kv_type=_TYPES[call.k_cache.dtype],
            kv_heads=plan.num_kv_heads,
            group=plan.num_q_heads // plan.num_kv_heads,
            head_dim=plan.head_dim,
            block_size=plan.block_size,
            causal=plan.causal,
            window=plan.window,
            score_scale=call.score_scale,
            softcap=call.softcap,
            v_scale=call.v_scale,
        )
        result = self._attention(self._pool, ctypes.addressof(arguments))
        if result == BAD_TABLE:
            check_table(table.numpy(), plan, call.k_cache.shape[0])
        if result == NO_MEMORY:
            raise MemoryError("no memory for the sums of a call's parts")

    def read_blocks(self, cache: Tensor, slots: npt.NDArray[np.int64]) -> int:
        """Read blocks ``slots`` of a cache [num_blocks, ...] on all threads, and nothing else.

        How long it takes is the least that attention over these blocks can take. Each block must be
        one run of bytes, a multiple of 8. Returns the sum of its 8-byte words, modulo 2^64.

        Raises InvalidInput.
        """
        block = cache[0]
        size = block.numel() * block.element_size()
        in_one_run = _is_one_run(block)
        require(
            in_one_run and size % 8 == 0,
            f"cache: got blocks of strides {block.stride()} and {size} bytes, "
            "want each in one piece, a multiple of 8 bytes",
        )
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        require(
            not slots.size or (slots.min() >= 0 and slots.max() < cache.shape[0]),
            f"slots: got some outside 0 to {cache.shape[0] - 1}",
        )
        offsets = slots * (cache.stride(0) * cache.element_size())
        arguments = (cache.data_ptr(), offsets.ctypes.data, len(offsets), size)
        return int(self._read(self._pool, *arguments))


def levels() -> list[str]:
    """The levels that this machine can run, slowest first. Raises BackendUnavailable."""
    return Library().levels()


def _renew_after_fork(alive: weakref.finalize[Any, Any], library: Library, pool: int) -> None:
    def renew() -> None:
        if alive.alive:
            library.pool_forked(pool)

    os.register_at_fork(after_in_child=renew)


def _cache(cache: Tensor) -> Cache:
    block, token, head, _ = cache.stride()
    return Cache(cache.data_ptr(), block, token, head)


def _is_one_run(block: Tensor) -> bool:
    """Whether the elements lie next to each other, in any order of the dimensions."""
    expected = 1
    for stride, length in sorted(zip(block.stride(), block.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
