"""The variants of the kernels: each is compiled on its own, by the macros of src/params.h."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tierkv_kernels.cuda.geometry import row_warps

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Those of the models there are."""

HEAD_DIMS_TAKEN = (*range(16, 129, 16), *range(160, 257, 32))
"""All that the kernels can be compiled for."""

Macros = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """kernel: what the source calls it. name: what the module does, so that tools show which."""

    kernel: str
    name: str
    macros: Macros = ()


def attention(*, bf16: bool, kv_fp8: bool, head_dim: int, row_warps: int) -> Variant:
    """Attention of queries in bfloat16, else float16, to caches in float8, else as the queries."""
    return _variant(
        "paged_attention", bf16=bf16, kv_fp8=kv_fp8, head_dim=head_dim, row_warps=row_warps
    )


def merge(*, bf16: bool, head_dim: int) -> Variant:
    """The merge of partial states."""
    return _variant("merge_partials", bf16=bf16, head_dim=head_dim)


def write_kv(*, bf16: bool, kv_fp8: bool, head_dim: int) -> Variant:
    """New tokens into the caches."""
    return _variant("write_kv", bf16=bf16, kv_fp8=kv_fp8, head_dim=head_dim)


def move() -> Variant:
    """Pieces of memory to where they are wanted."""
    return Variant("move_pieces", "move_pieces")


def variants_for(head_dims: Iterable[int] = HEAD_DIMS) -> Iterator[Variant]:
    """All that calls with these head dimensions may need."""
    yield move()
    for head_dim in head_dims:
        for bf16 in (True, False):
            yield merge(bf16=bf16, head_dim=head_dim)
            for kv_fp8 in (False, True):
                yield write_kv(bf16=bf16, kv_fp8=kv_fp8, head_dim=head_dim)
                for rows in (1, 1 << 20):
                    yield attention(
                        bf16=bf16,
                        kv_fp8=kv_fp8,
                        head_dim=head_dim,
                        row_warps=row_warps(rows, head_dim),
                    )


def _variant(
    kernel: str,
    *,
    bf16: bool,
    head_dim: int,
    kv_fp8: bool | None = None,
    row_warps: int | None = None,
) -> Variant:
    name = f"{kernel}_{'bf16' if bf16 else 'f16'}"
    macros = [("TKV_BF16", int(bf16)), ("TKV_HEAD_DIM", head_dim)]
    if kv_fp8 is not None:
        name += "_fp8" if kv_fp8 else ""
        macros.append(("TKV_KV_FP8", int(kv_fp8)))
    name += f"_d{head_dim}"
    if row_warps is not None:
        name += f"_w{row_warps}"
        macros.append(("TKV_ROW_WARPS", row_warps))
    return Variant(kernel, name, tuple(macros))
