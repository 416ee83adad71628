"""What holds for the compiled kernel alone: its threads, its bits, its reading loop."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_batches import FP8, Batch, Shape, check_output, make_batch
from backends import each_level, kernel_of, levels_here, with_kernel
from tierkv_kernels import InvalidInput, plan
from tierkv_kernels.call import check_call
from tierkv_kernels.cpu import Kernel, read_blocks

SHAPE = Shape(
    lengths=((2000, 1), (1, 1), (700, 3), (513, 1), (1024, 1), (300, 200), (0, 1)),
    kv_heads=3,
    group=4,
    head_dim=64,
    dtype=torch.bfloat16,
)


DEFAULTS = {"plan": None, "scale": None, "k_scale": 1.0, "v_scale": 1.0, "out": None}


def attend(kernel: Kernel, batch: Batch, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = with_kernel(kernel)(*batch.tensors, **batch.options, return_lse=True, **options)
    assert lse is not None
    return out, lse


@each_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_each_dtype_and_head_dim(
    level: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int
) -> None:
    for group in (1, 6, 7):
        shape = Shape(
            lengths=((530, 1), (37, 2), (40, 9)),
            group=group,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        batch = make_batch(shape)
        check_output(batch, *attend(kernel_of(level), batch))


@each_level
@pytest.mark.parametrize("split", [0, 100, 512])
def test_the_bits_depend_neither_on_threads_nor_on_the_batch(level: str, split: int) -> None:
    batch = make_batch(SHAPE)

    def run(rows: slice, threads: int) -> list[torch.Tensor]:
        work = plan(*zip(*SHAPE.lengths[rows], strict=True), **SHAPE.geometry, split=split)
        first, last = int(batch.q_indptr[rows.start]), int(batch.q_indptr[rows.stop])
        out, lse = with_kernel(kernel_of(level, threads))(
            batch.q[first:last],
            batch.k_cache,
            batch.v_cache,
            batch.block_table[rows],
            batch.seq_lens[rows],
            q_indptr=batch.q_indptr[rows.start : rows.stop + 1] - first,
            plan=work,
            return_lse=True,
        )
        assert lse is not None
        return [out, lse]

    count = len(SHAPE.lengths)
    whole = run(slice(0, count), 1)
    for threads in (2, 3, 7):
        assert all(map(torch.equal, run(slice(0, count), threads), whole))
    alone = [run(slice(row, row + 1), 2) for row in range(count)]
    for together, apart in zip(whole, zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(apart))


def test_a_shared_prefix_longer_than_a_chunk() -> None:
    shape = Shape(
        lengths=((1500, 1), (1400, 2), (1310, 1)), shared_tokens=1296, block_size=16, head_dim=64
    )
    batch = make_batch(shape)
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, shared_prefix=[(0, 3, 1296)])
    check_output(batch, *attend(kernel_of(levels_here()[-1]), batch, plan=work))


def test_many_queries_of_many_heads_share_a_prefix() -> None:
    shape = Shape(
        lengths=((900, 1),) * 9, shared_tokens=640, block_size=16, head_dim=64, group=4, kv_heads=1
    )
    batch = make_batch(shape)
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, shared_prefix=[(0, 9, 640)])
    check_output(batch, *attend(kernel_of(levels_here()[-1]), batch, plan=work))


@each_level
def test_a_key_that_is_no_number_is_not_hidden(level: str) -> None:
    for kv_dtype in (None, FP8):
        for q_len in (1, 30):
            shape = Shape(lengths=((100, q_len), (100, q_len)), head_dim=64, kv_dtype=kv_dtype)
            batch = make_batch(shape)
            slot = int(batch.block_table[0, 1])
            batch.k_cache[slot, 3, 0, 5] = torch.tensor(torch.nan).to(batch.k_cache.dtype)
            out, _ = attend(kernel_of(level), batch)
            assert out[:q_len, :2].isnan().all()
            assert out[:q_len, 2:].isfinite().all()
            assert out[q_len:].isfinite().all()


@each_level
def test_no_number_has_bits_that_make_it_one(level: str) -> None:
    for q_len in (1, 30):
        batch = make_batch(Shape(lengths=((100, q_len),), head_dim=64, dtype=torch.float32))
        key = batch.k_cache[int(batch.block_table[0, 1]), 3, 0]
        for bits in (-1, 0x7FC00001, 0x7FFFFFFF):
            key.view(torch.int32)[5] = bits
            out, lse = attend(kernel_of(level), batch)
            assert out[:, :2].isnan().all()
            assert lse[:, :2].isnan().all()


def test_two_threads_may_call_at_once() -> None:
    batch = make_batch(SHAPE)
    kernel = kernel_of(levels_here()[-1], 3)
    want, _ = attend(kernel, batch)
    wrong = []

    def call() -> None:
        for _ in range(30):
            call = check_call(*batch.tensors, **batch.options, **DEFAULTS, return_lse=False)
            kernel.run(call)
            if not torch.equal(call.out, want):
                wrong.append(call.out)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_the_child_of_a_fork_has_threads_of_its_own() -> None:
    batch = make_batch(SHAPE)
    kernel = kernel_of(levels_here()[-1], 2)
    want, _ = attend(kernel, batch)
    child = os.fork()
    if child == 0:
        same = False
        try:
            out, _ = attend(kernel, batch)
            # Compared by NumPy: torch's own threads do not survive a fork.
            same = np.array_equal(bits(out), bits(want)) and threads_here() == 2
        finally:
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert torch.equal(attend(kernel, batch)[0], want)


def bits(out: torch.Tensor) -> np.ndarray:
    return out.view(torch.int16).numpy()


def threads_here() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_start_with_the_first_large_call_and_end_with_the_kernel() -> None:
    before = threads_here()
    kernel = Kernel(threads=5)
    small = make_batch(Shape(lengths=((5, 1),), head_dim=64))
    attend(kernel, small)
    assert threads_here() == before
    large = make_batch(SHAPE)
    attend(kernel, large)
    assert threads_here() == before + 4
    del kernel
    gc.collect()
    assert threads_here() == before


CALLS_AT_THE_END = """
import atexit
atexit.register(lambda: print(attend(), attend()))  # before torch's: runs after them
import torch
from tierkv_kernels.cpu import Kernel
from tierkv_kernels.call import check_call
kernel = Kernel(threads=3)
def attend():
    cache, q = torch.ones(256, 16, 2, 64), torch.ones(1, 8, 64)
    table, lens = torch.arange(256, dtype=torch.int32)[None], torch.tensor([4096]).int()
    call = check_call(q, cache, cache, table, lens, q_indptr=None, plan=None, scale=None,
        causal=True, window=-1, softcap=0.0, k_scale=1.0, v_scale=1.0, out=None, return_lse=False)
    kernel.run(call)
    return call.out.sum().item()
attend()
"""


def test_a_call_while_the_process_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS_AT_THE_END], capture_output=True, text=True, timeout=40
    )
    assert (done.returncode, done.stdout) == (0, "512.0 512.0\n"), done.stderr


def test_threads_must_be_one_or_more() -> None:
    with pytest.raises(InvalidInput, match="threads: got 0, want at least 1"):
        Kernel(threads=0)


@each_level
@pytest.mark.parametrize("heads_first", [False, True])
def test_reading_blocks_adds_up_their_words(level: str, heads_first: bool) -> None:
    pool = torch.randint(256, (9, 2, 5, 3, 88), dtype=torch.uint8)
    cache = pool[:, 1].transpose(1, 2) if heads_first else pool[:, 1]
    slots = np.array([7, 0, 3, 3])
    words = pool[slots, 1].contiguous().numpy().view(np.uint64)
    assert kernel_of(level).read_blocks(cache, slots) == int(words.sum())
    assert kernel_of(level).read_blocks(cache, slots[:0]) == 0


def test_what_cannot_be_read_is_refused() -> None:
    cache = torch.zeros(4, 16, 2, 64)
    with pytest.raises(InvalidInput, match="slots: got some outside 0 to 3"):
        read_blocks(cache, np.array([4]))
    with pytest.raises(InvalidInput, match="want each in one piece"):
        read_blocks(cache[:, :, 1:], np.array([0]))
