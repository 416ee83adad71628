"""The kernels beside attention, in the simulator: merge, moves, writes, and float8 conversions."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_batches import FP8
from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.driver import arguments_of
from tierkv_kernels.cuda.images import SOURCES
from tierkv_kernels.cuda.params import MergeParams, MoveParams, MovePiece, WriteParams

from tests.kernels.sim.build import compiler, library_of
from tests.kernels.sim.simulator import SCHEDULES, Simulated, SimulatedDevice

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler ($CXX, else g++)")

CONVERSIONS = Path(__file__).with_name("conversions.cu")
BEFORE_SM_89 = ("-DTKV_HAS_E4M3=0",)
MERGE_THREADS = WRITE_THREADS = 128
MOVE_THREADS = 256
SPAN_BYTES = 32768


def addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merge_against_float64(dtype: torch.dtype, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    rows_of = [[0, 3, 1], [2], [7, 4], list(range(8, 48)), [5, 6]]
    tokens = torch.tensor([4, 0, 6, 2, 1], dtype=torch.int32)
    heads, states = 3, 48
    partial_out = torch.randn(states, heads, head_dim, generator=generator)
    partial_lse = torch.randn(states, heads, generator=generator) * 30
    blind = [4, 5, 6, 20]  # one of two, both, one of forty
    partial_out[blind], partial_lse[blind] = 0, -torch.inf
    indptr = torch.tensor([0, *(len(rows) for rows in rows_of)]).cumsum(0).to(torch.int32)
    rows = torch.tensor([row for rows in rows_of for row in rows], dtype=torch.int32)
    out = torch.full((7, heads + 1, head_dim), torch.nan, dtype=dtype)
    lse = torch.full((7, heads), torch.nan)
    for want_lse in (False, True):
        params = MergeParams(
            *addresses(partial_out, partial_lse, tokens, indptr, rows, out),
            lse.data_ptr() if want_lse else 0,
            *out.stride()[:2],
            len(rows_of),
            heads,
        )
        variant = variants.merge(bf16=dtype == torch.bfloat16, head_dim=head_dim)
        grid = (len(rows_of) * heads, 1, 1)
        function = SimulatedDevice().function(variant)
        function.launch(grid, MERGE_THREADS, 0, 0, arguments_of(params))
        assert lse.isnan().all() != want_lse
    for token, mine in zip(tokens.tolist(), rows_of, strict=True):
        weights = partial_lse[mine].double().exp()
        total = weights.sum(0)
        want = (weights[..., None] * partial_out[mine].double()).sum(0)
        want /= torch.where(total > 0, total, 1.0)[:, None]
        torch.testing.assert_close(out[token, :heads], want.to(dtype), rtol=1e-2, atol=1e-5)
        torch.testing.assert_close(lse[token].double(), total.log(), rtol=1e-6, atol=1e-5)
    assert out[[3, 5]].isnan().all()
    assert out[:, heads].isnan().all()
    assert lse[[3, 5]].isnan().all()


PIECES = {
    "whole blocks": [(65536, 0, 0), (65536, 0, 0), (32768, 0, 0)],
    "tails": [(1, 0, 0), (15, 0, 0), (16, 0, 0), (17, 0, 0), (32769, 0, 0), (100_003, 0, 0)],
    "odd addresses": [(40_000, 1, 0), (40_000, 0, 8), (33, 3, 3), (50, 5, 9)],
    "nothing and something": [(0, 0, 0), (48, 0, 0)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_arrive_and_nothing_beside_them_changes(pieces: str, schedule: str) -> None:
    check_moves(pieces, SimulatedDevice(schedule))


def check_moves(pieces: str, device: SimulatedDevice) -> None:
    random = np.random.default_rng(3)
    chosen = PIECES[pieces]
    room = sum(count + 64 for count, _, _ in chosen)
    source, target = (_aligned(random.integers(0, 256, room, np.uint8)) for _ in range(2))
    want = target.copy()
    listed = (MovePiece * len(chosen))()
    begin = 0
    order = random.permutation(len(chosen))
    for nth in order:
        count, skip_from, skip_to = chosen[nth]
        source_begin, target_begin = begin + skip_from, begin + skip_to
        listed[nth] = MovePiece(
            source.ctypes.data + source_begin, target.ctypes.data + target_begin, count
        )
        want[target_begin : target_begin + count] = source[source_begin : source_begin + count]
        begin += -(-(count + 32) // 16) * 16
    spans = max(1, -(-max(count for count, _, _ in chosen) // SPAN_BYTES))
    params = MoveParams(ctypes.addressof(listed), len(chosen), spans)
    function = device.function(variants.move())
    function.launch((len(chosen) * spans, 1, 1), MOVE_THREADS, 0, 0, arguments_of(params))
    assert np.array_equal(target, want)


def _aligned(values: np.ndarray) -> np.ndarray:
    room = np.empty(len(values) + 16, np.uint8)
    begin = -room.ctypes.data % 16
    room[begin : begin + len(values)] = values
    return room[begin : begin + len(values)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, FP8, "FP8 before sm_89"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_new_tokens_are_stored_in_their_slots(
    dtype: torch.dtype, kv_dtype: torch.dtype | str | None, head_dim: int
) -> None:
    macros = BEFORE_SM_89 if kv_dtype == "FP8 before sm_89" else ()
    stored = FP8 if kv_dtype else dtype
    generator = torch.Generator().manual_seed(5)
    heads, block_size, tokens = 3, 5, 7
    fused = torch.randn(tokens, 4 * heads, head_dim, generator=generator).to(dtype) * 100
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads : 3 * heads]
    shape = (6, 2, heads, block_size, head_dim)  # blocks of heads first, keys before values
    pool = torch.zeros(shape).to(stored)
    k_cache, v_cache = (pool[:, i].transpose(1, 2) for i in range(2))
    slots = torch.tensor([29, 0, -1, 13, 7, 14, -5])
    scales = (0.5, 4.0)
    params = WriteParams(
        *addresses(k, v, slots, k_cache, v_cache),
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        tokens,
        heads,
        block_size,
        *scales,
    )
    variant = variants.write_kv(
        bf16=dtype == torch.bfloat16, kv_fp8=stored == FP8, head_dim=head_dim
    )
    function = SimulatedDevice(macros=macros).function(variant)
    function.launch((tokens, 1, 1), WRITE_THREADS, 0, 0, arguments_of(params))
    want = torch.zeros_like(pool)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for i, (new, scale) in enumerate(zip((k, v), scales, strict=True)):
            values = new[token].float() * scale
            if stored == FP8:
                values = values.clamp(-448, 448)
            want[slot // block_size, i, :, slot % block_size] = values.to(stored)
    assert torch.equal(pool.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("macros", [(), BEFORE_SM_89])
def test_every_float8_is_widened_as_it_should_be(macros: tuple[str, ...]) -> None:
    check_widening(macros)


@pytest.mark.parametrize("macros", [(), BEFORE_SM_89])
def test_floats_are_narrowed_to_the_nearest_float8(macros: tuple[str, ...]) -> None:
    check_narrowing(macros)


def check_widening(macros: tuple[str, ...], sources: Path = SOURCES) -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    room = torch.empty(256, dtype=torch.float16)
    got = _convert("widen", stored, room, macros, sources)
    want = stored.view(FP8).half()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isnan(), torch.arange(256) % 128 == 127)
    assert torch.equal(got.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))


def check_narrowing(macros: tuple[str, ...], sources: Path = SOURCES) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    every = every[every.isfinite()].sort().values
    halfway = (every[1:] + every[:-1]) / 2
    beside = [torch.nextafter(halfway, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    special = torch.tensor([0.0, -0.0, 447.9, 449.0, 464.0, 1e30, -1e30, torch.inf, -torch.inf])
    values = torch.cat((every, halfway, *beside, special, torch.tensor([torch.nan])))
    values = torch.cat((values, torch.zeros(-len(values) % 256)))
    got = _convert("narrow", values, torch.empty(len(values), dtype=torch.uint8), macros, sources)
    want = values.clamp(-448, 448).to(FP8)
    assert torch.equal(got, want.view(torch.uint8))


def _convert(
    name: str, values: torch.Tensor, out: torch.Tensor, macros: tuple[str, ...], sources: Path
) -> torch.Tensor:
    """Each value by a thread of its own."""

    class Params(ctypes.Structure):
        _fields_ = (("source", ctypes.c_uint64), ("target", ctypes.c_uint64))

    params = Params(values.data_ptr(), out.data_ptr())
    function = Simulated(
        library_of(CONVERSIONS, macros=macros, sources=sources), name, "ring", seed=1
    )
    function.launch((len(values) // 256, 1, 1), 256, 0, 0, arguments_of(params))
    return out
