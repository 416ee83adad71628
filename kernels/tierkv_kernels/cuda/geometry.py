"""How the attention kernel is cut, and what shared memory it takes: as in paged_attention.cu."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 128
ROWS_PER_WARP = 16


@dataclass(frozen=True, slots=True)
class Geometry:
    """One variant of the kernel: head_dim, bytes of an element of the caches, and its row warps."""

    head_dim: int
    kv_bytes: int
    row_warps: int

    @property
    def rows(self) -> int:
        """(query token, head of the group) pairs that a thread block works on."""
        return ROWS_PER_WARP * self.row_warps

    @property
    def key_warps(self) -> int:
        """Warps with the same rows and keys of their own."""
        dim_warps = 2 if self.head_dim > 128 else 1
        return THREADS // 32 // (self.row_warps * dim_warps)

    @property
    def tile_tokens(self) -> int:
        """Keys that are fetched at once."""
        return 64 if self.head_dim <= 128 else 32

    @property
    def stages(self) -> int:
        """Tiles in shared memory, all but one of them on their way."""
        return 2 if self.kv_bytes == 2 else 3

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        queries = self.rows * _padded(2 * self.head_dim)
        addresses = 2 * 2 * 8 * self.tile_tokens
        tile = 2 * self.tile_tokens * _padded(self.kv_bytes * self.head_dim)
        outputs = self.rows * self.key_warps * (8 + 4 * (self.head_dim + 8))
        return queries + addresses + max(self.stages * tile, outputs)


def _padded(row_bytes: int) -> int:
    """An odd number of 16 bytes, so that no two of eight rows meet in a bank."""
    return row_bytes if row_bytes // 16 % 2 else row_bytes + 16


def row_warps(rows: int, head_dim: int) -> int:
    """Of the variant for a record with so many rows (``n_tok`` times the heads of the group).

    The choice is made record by record, not for a batch, so that a sequence gets the same bits in
    any batch.
    """
    if rows <= ROWS_PER_WARP:
        return 1
    return 4 if head_dim <= 128 else 2
