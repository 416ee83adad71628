"""Mistakes planted in the CUDA sources, each of which the simulator's tests must notice.

``python -m tests.kernels.sim.mutants`` tries all of them, each in a process of its own, and prints
a line for each: its name, a tab, and what noticed it, or SURVIVED. A mutant that does not fit the
sources any more, or does not compile, ends it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the helpers of the tests of attention

from attention_batches import FP8, Shape, check_output, make_batch
from tierkv_kernels import plan
from tierkv_kernels.cuda.images import SOURCES

from tests.kernels.sim import test_other_kernels as others
from tests.kernels.sim.build import KEPT, CannotCompile
from tests.kernels.sim.simulator import SCHEDULES, SimulatedDevice, attention
from tests.mutants.mutation import Edit, apply

SURVIVED = "SURVIVED"
QUICK = ("-O1",)

ATTENTION = "paged_attention.cu"
DECODE = {"lengths": ((150, 1), (70, 1)), "kv_heads": 1, "group": 3}
EXTEND = {"lengths": ((200, 33), (3, 5)), "kv_heads": 1, "group": 3}


@dataclass(frozen=True)
class Mutant:
    """One mistake, and the case in which it must be noticed."""

    name: str
    case: str
    edit: Edit


def _decode(sources: Path) -> None:
    _attend(sources, Shape(**DECODE, head_dim=64, dtype=torch.bfloat16, in_order=True))


def _extend(sources: Path) -> None:
    _attend(sources, Shape(**EXTEND, head_dim=64, dtype=torch.bfloat16, in_order=True))


def _window(sources: Path) -> None:
    _attend(sources, Shape(**EXTEND, head_dim=64, dtype=torch.bfloat16, window=20))


def _fp8(sources: Path) -> None:
    shape = Shape(**DECODE, head_dim=64, dtype=torch.bfloat16, kv_dtype=FP8)
    _attend(sources, shape)


def _wide(sources: Path) -> None:
    _attend(sources, Shape(**DECODE, head_dim=256, dtype=torch.float16))


def _split(sources: Path) -> None:
    _attend(sources, Shape(**DECODE, head_dim=64, dtype=torch.float16), split=64)


def _attend(sources: Path, shape: Shape, split: int = 0) -> None:
    batch = make_batch(shape)
    for schedule in SCHEDULES:
        work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, **shape.mask, split=split)
        device = SimulatedDevice(schedule, options=QUICK, sources=sources)
        out, lse = attention(device, *batch.tensors, **batch.options, plan=work, return_lse=True)
        check_output(batch, out, lse)
        for function in device.functions.values():
            assert function.bank_conflicts == 0, "rows in the same banks"


def _far(sources: Path) -> None:
    """Blocks more than 2 ** 31 elements apart; only a few pages are ever touched."""
    num_blocks = 2**31 // (16 * 64) + 8
    cache = torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16)
    slots = [num_blocks - 1, 0]
    cache[slots] = torch.randn(2, 16, 1, 64).half()
    tables = torch.tensor([slots, [0, 1]], dtype=torch.int32)
    seq_lens = torch.tensor([25], dtype=torch.int32)
    query = torch.randn(1, 1, 64).half()
    device = SimulatedDevice(options=QUICK, sources=sources)
    got, _ = attention(device, query, cache, cache, tables[:1], seq_lens)
    near = cache[slots]
    want, _ = attention(device, query, near, near, tables[1:].flip(1) * -1 + 1, seq_lens)
    assert torch.equal(got, want), "far blocks differ from near ones"


def _moves(sources: Path) -> None:
    for pieces in others.PIECES:
        others.check_moves(pieces, SimulatedDevice(options=QUICK, sources=sources))


def _float8(sources: Path) -> None:
    for macros in ((), others.BEFORE_SM_89):
        others.check_widening(macros, sources)
        others.check_narrowing(macros, sources)


CASES: dict[str, Callable[[Path], None]] = {
    "decode": _decode,
    "extend": _extend,
    "window": _window,
    "fp8": _fp8,
    "wide": _wide,
    "split": _split,
    "far": _far,
    "moves": _moves,
    "float8": _float8,
}


def _in_attention(name: str, case: str, old: str, new: str) -> Mutant:
    return Mutant(name, case, Edit(ATTENTION, old, new))


MUTANTS = (
    # Barriers and copies.
    _in_attention(
        "no barrier when a tile is there",
        "decode",
        "    dev::block_sync();  // for all this tile is there",
        "    // for all this tile is there",
    ),
    _in_attention(
        "no barrier before the first copies",
        "decode",
        "    dev::block_sync();\n    fetch_tile(params, shared, tile);",
        "    fetch_tile(params, shared, tile);",
    ),
    _in_attention(
        "no barrier before outputs take the place of tiles",
        "decode",
        "  dev::copy_wait<0>();\n  dev::block_sync();\n",
        "  dev::copy_wait<0>();\n",
    ),
    _in_attention(
        "no barrier between states and their reader",
        "decode",
        "  dev::block_sync();\n  for (int i = 0; i < 2; ++i) {\n",
        "  for (int i = 0; i < 2; ++i) {\n",
    ),
    _in_attention(
        "no barrier between outputs and their sum",
        "decode",
        "  dev::block_sync();\n}\n\nTKV_DEVICE void write_outputs",
        "}\n\nTKV_DEVICE void write_outputs",
    ),
    _in_attention(
        "the wait for a tile is one group short",
        "decode",
        "dev::copy_wait<STAGES - 2>();",
        "dev::copy_wait<STAGES - 1>();",
    ),
    _in_attention("no wait for the last copies", "decode", "  dev::copy_wait<0>();\n", ""),
    _in_attention(
        "copies of a tile are not committed",
        "decode",
        "    dev::copy_commit();\n    const int block",
        "    const int block",
    ),
    _in_attention(
        "copies go to the stage that is read",
        "decode",
        "const u32 stage = shared + STAGE_0 + tile % STAGES * STAGE;",
        "const u32 stage = shared + STAGE_0 + (tile + 1) % STAGES * STAGE;",
    ),
    _in_attention(
        "copies to places that are not aligned",
        "decode",
        "dev::copy_async(stage + row * KV_ROW + 16 * chunk,",
        "dev::copy_async(stage + row * KV_ROW + 8 * chunk,",
    ),
    _in_attention(
        "keys past the end are copied from anywhere",
        "decode",
        "wanted ? address + 16 * chunk : params.k_cache, wanted);",
        "wanted ? address + 16 * chunk : params.k_cache, true);",
    ),
    _in_attention(
        "tiles behind the first ones are in block 0",
        "decode",
        "finder.note(params, work.head, shared, tile + STAGES, block);",
        "finder.note(params, work.head, shared, tile + STAGES, 0 * block);",
    ),
    _in_attention(
        "rows of equal banks",
        "decode",
        "return bytes / 16 % 2 ? bytes : bytes + 16;",
        "return bytes;",
    ),
    # Where things are.
    _in_attention(
        "the block of the next token",
        "decode",
        "4ll * (key(tile) / params.block_size)",
        "4ll * ((key(tile) + 1) / params.block_size)",
    ),
    _in_attention(
        "offsets of 32 bits",
        "far",
        "      const i64 offset =\n          of_values()",
        "      const int offset =\n          of_values()",
    ),
    _in_attention(
        "both halves of a wide head's values are the first",
        "wide",
        " + 16 * KV_BYTES * OWN_GROUPS * place.dim_warp;",
        ";",
    ),
    _in_attention(
        "float8 keys meet queries in plain order",
        "fp8",
        "eight_dims.word[0], eight_dims.word[2]);",
        "eight_dims.word[0], eight_dims.word[1]);",
    ),
    _in_attention(
        "odd dimensions of float8 values are even ones",
        "fp8",
        "unpack_e4m3<1, 3>(x[0]),",
        "unpack_e4m3<0, 2>(x[0]),",
    ),
    # Masks.
    _in_attention(
        "a query sees the key after it",
        "extend",
        "larger<i64>(position, -1)",
        "larger<i64>(position + 1, -1)",
    ),
    _in_attention(
        "a window is one key short",
        "window",
        "first = static_cast<int>(position - params.window);",
        "first = static_cast<int>(position - params.window + 1);",
    ),
    _in_attention(
        "no tile is masked",
        "extend",
        "if (masked) {",
        "if (false && masked) {",
    ),
    # The running softmax.
    _in_attention(
        "both rows grow as the first",
        "extend",
        "output.value[i][j] *= factor[j / 2];",
        "output.value[i][j] *= factor[0];",
    ),
    _in_attention(
        "the sum is not scaled",
        "decode",
        "output.sum[i] * factor[i] + sum;",
        "output.sum[i] + sum;",
    ),
    _in_attention(
        "the greatest of two lanes, not of four",
        "decode",
        "    greatest = larger(greatest, dev::shuffle_xor(greatest, 2));\n",
        "",
    ),
    _in_attention(
        "lanes vote only if they grew",
        "decode",
        "if (!dev::any(grew)) return;",
        "if (!grew || !dev::any(grew)) return;",
    ),
    _in_attention(
        "rows without a key are divided by zero",
        "extend",
        "sum > 0 ? dev::exp2(output.greatest[i] - base) * params.v_scale / sum : 0;",
        "dev::exp2(output.greatest[i] - base) * params.v_scale / sum;",
    ),
    # Beside attention.
    Mutant(
        "partial states weigh alike",
        "split",
        Edit("merge.cu", "low += weight * dev::float_of", "low += dev::float_of"),
    ),
    Mutant(
        "the last bytes of a piece are rounded up",
        "moves",
        Edit("move.cu", "end - end % 16;", "(end + 15) / 16 * 16;"),
    ),
    Mutant(
        "float8 is widened by the wrong power of two",
        "float8",
        Edit("e4m3.cuh", "0x5c005c00u", "0x60006000u"),
    ),
    Mutant(
        "float8 ties go up",
        "float8",
        Edit("e4m3.cuh", "0x7ffff + (magnitude >> 20 & 1)", "0x80000"),
    ),
)

CONTROLS = (
    _in_attention("copies are unrolled by two", "decode", "#pragma unroll 4", "#pragma unroll 2"),
    _in_attention(
        "a wider search for the mask", "extend", "if (masked) {", "if (masked || true) {"
    ),
)


def hunt(mutant: Mutant) -> str:
    """What noticed it, in a line, or SURVIVED. Raises Unfit, CannotCompile."""
    sources = KEPT / "mutants" / mutant.name.replace(" ", "_")
    shutil.copytree(SOURCES, sources, dirs_exist_ok=True)
    broken = sources / mutant.edit.module
    broken.write_text(apply(mutant.edit, (SOURCES / mutant.edit.module).read_text()))
    try:
        CASES[mutant.case](sources)
    except CannotCompile:
        raise
    except Exception as error:
        said = str(error).strip().splitlines()
        return f"{type(error).__name__}: {said[0] if said else ''}"
    return SURVIVED


def _report(mutant: Mutant) -> None:
    print(f"{mutant.name}\t{hunt(mutant)}", flush=True)


def main() -> None:
    """Each in a fork, as a mistake may end the process; as many at once as there are cores."""
    torch.set_num_threads(1)
    forks = multiprocessing.get_context("fork")
    running: list[tuple[Mutant, multiprocessing.process.BaseProcess]] = []
    for mutant in (*MUTANTS, *CONTROLS):
        if len(running) == os.cpu_count():
            _finish(*running.pop(0))
        process = forks.Process(target=_report, args=(mutant,))
        process.start()
        running.append((mutant, process))
    for one in running:
        _finish(*one)


def _finish(mutant: Mutant, process: multiprocessing.process.BaseProcess) -> None:
    process.join()
    if process.exitcode is None or process.exitcode > 0:
        sys.exit(f"the mutant does not work: {mutant.name}")
    if process.exitcode < 0:
        print(f"{mutant.name}\tsignal {-process.exitcode}", flush=True)


if __name__ == "__main__":
    main()
