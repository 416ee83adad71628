"""Every kernel compiles for every generation of cards, within the registers that it may take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.images import compile_variant
from tierkv_kernels.cuda.nvrtc import Nvrtc, Usage
from tierkv_kernels.cuda.variants import Variant

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
REGISTERS_MAX = 168
"""Of attention at head dimension 128: so many let three thread blocks share a multiprocessor."""

COMMON_HEAD_DIM = 128
FULL = os.environ.get("TIERKV_COMPILE_GATE") == "full"


def usages(wanted: Sequence[tuple[Variant, str]]) -> list[Usage]:
    nvrtc = Nvrtc.find()

    def usage(variant: Variant, arch: str) -> Usage:
        return compile_variant(variant, arch, nvrtc).usage()[variant.name]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(usage, *zip(*wanted, strict=True)))


def complaints(wanted: Sequence[tuple[Variant, str]]) -> list[str]:
    found = []
    for (variant, arch), usage in zip(wanted, usages(wanted), strict=True):
        limit = 255
        if variant.kernel == "paged_attention" and f"_d{COMMON_HEAD_DIM}_" in variant.name:
            limit = REGISTERS_MAX
        if usage.stack_bytes or usage.spill_bytes or usage.registers > limit:
            found.append(f"{variant.name} on {arch}: {usage}")
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_the_common_head_dimension(arch: str) -> None:
    wanted = [(variant, arch) for variant in variants.variants_for([COMMON_HEAD_DIM])]
    assert complaints(wanted) == []


@pytest.mark.slow
@pytest.mark.timeout(1200 if FULL else 300)
def test_all_other_kernels() -> None:
    """Each for one generation in turn; all for all, of more head dimensions, with "full"."""
    known = variants.HEAD_DIMS_TAKEN if FULL else variants.HEAD_DIMS
    head_dims = [head_dim for head_dim in known if head_dim != COMMON_HEAD_DIM]
    wanted = [
        (variant, arch)
        for i, variant in enumerate(variants.variants_for(head_dims))
        for j, arch in enumerate(ARCHS)
        if FULL or i % len(ARCHS) == j
    ]
    assert complaints(wanted) == []


def test_each_head_dimension_compiles_that_is_taken() -> None:
    wanted = [
        (variants.attention(bf16=True, kv_fp8=False, head_dim=head_dim, row_warps=1), "sm_90")
        for head_dim in variants.HEAD_DIMS_TAKEN
    ]
    assert complaints(wanted) == []


def test_macros_reach_every_kernel() -> None:
    """A misspelt macro would compile the same code under several names."""
    base = {"bf16": True, "kv_fp8": False, "head_dim": 64, "row_warps": 1}
    changes = ({}, {"bf16": False}, {"kv_fp8": True}, {"head_dim": 80}, {"row_warps": 4})
    images = []
    for change in (*changes, {}):
        named = variants.attention(**{**base, **change})
        nameless = Variant(named.kernel, named.kernel, named.macros)
        images.append(compile_variant(nameless, "sm_90", Nvrtc.find()).image)
    assert images[0] == images[-1]
    assert len(set(images)) == len(changes)
