"""What the sync and the asyncio worker API share: everything that asks the daemon nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tierkv.client.copying import paged_blocks, rows_of
from tierkv.client.namespaces import AttendPlan, NamespaceCore
from tierkv.client.sequences import I32, CachedPrefix, SequenceCore
from tierkv.core.ids import U32
from tierkv.core.spec import KVSpec
from tierkv.native.pages import Pages

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    import torch

    from tierkv.client.paged import PagedPool

Where = Literal["worker", "daemon"]


class SequenceViews:
    """A worker's sequence. One call at a time may change it."""

    def __init__(self, core: SequenceCore) -> None:
        self._core = core

    def __repr__(self) -> str:
        core = self._core
        state = "lost" if core.lost else "suspended" if core.suspended else "active"
        return f"<Sequence {core.number}: {core.num_tokens} tokens, {state}>"

    @property
    def tokens(self) -> U32:
        """The token ids so far, cached ones included (u32 [num_tokens], read-only snapshot)."""
        return self._core.tokens

    @property
    def num_tokens(self) -> int:
        """Tokens whose K and V lie in the blocks."""
        return self._core.num_tokens

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that were found cached when the sequence began."""
        return self._core.cached.tokens

    @property
    def cached_from(self) -> CachedPrefix:
        """The same, with how many blocks came from which tier."""
        return self._core.cached

    @property
    def ready_tokens(self) -> int:
        """Leading cached tokens whose blocks may be used: all, but after ``begin(wait=False)``."""
        return self._core.ready * self._core.block_tokens

    @property
    def load_s(self) -> float:
        """How long the other cached blocks should take to come up, in seconds; an estimate."""
        return self._core.load_s

    @property
    def block_table(self) -> I32:
        """Slot of every block in the pool, in order (i32 [blocks], read-only snapshot).

        While blocks are coming up, of the ready ones.

        Raises LeaseLost, or InvalidArgument when the sequence is suspended or has ended.
        """
        self._core.require_active()
        return self._core.table

    @property
    def suspended(self) -> bool:
        """True from ``suspend`` to ``resume``: the slots are not this sequence's."""
        return self._core.suspended

    @property
    def lost(self) -> bool:
        """True once the daemon no longer holds it: begin again with ``tokens``."""
        return self._core.lost

    def write_blocks(self, first_block: int, data: Any) -> int:
        """Copy whole blocks into reserved ones, from block ``first_block`` on; returns how many.

        ``data``: u8 [n, spec.block_bytes], or anything whose contiguous memory holds n blocks (an
        array of any dtype, bytes, a CPU tensor's ``.view(torch.uint8).numpy()``). One call copies
        all of it and frees the GIL. Each block's checksum is computed while its bytes pass, and
        used by ``append``. So do not write into these blocks through views of the pool between
        this and ``append``: the checksum would not fit, and the block be lost to everyone, as a
        miss. Writing again by this, or by ``Namespace.write_kv``, is fine.

        Raises InvalidArgument unless the blocks are reserved, and LeaseLost.
        """
        rows = rows_of("data", data, self._block_bytes)
        return self._core.write_blocks(first_block, rows)

    def read_blocks(self, first_block: int, out: Any) -> int:
        """Fill ``out`` with whole blocks from block ``first_block`` on; returns how many.

        ``out``: as ``data`` of ``write_blocks``, and writable. One call copies all of it and frees
        the GIL. Raises InvalidArgument unless the blocks have tokens and are there, and LeaseLost.
        """
        rows = rows_of("out", out, self._block_bytes, writable=True)
        return self._core.read_blocks(first_block, rows)

    def write_pages(self, first_block: int, pages: Pages, ids: Any) -> int:
        """``write_blocks`` out of an engine's pages: its blocks ``ids`` (integers [n])."""
        rows = paged_blocks(pages, ids, self._block_bytes)
        return self._core.write_blocks(first_block, rows)

    def read_pages(self, first_block: int, pages: Pages, ids: Any) -> int:
        """``read_blocks`` into an engine's pages: its blocks ``ids`` (integers [n])."""
        rows = paged_blocks(pages, ids, self._block_bytes, writable=True)
        return self._core.read_blocks(first_block, rows)

    @property
    def _block_bytes(self) -> int:
        return self._core.namespace.spec.block_bytes


class NamespaceViews:
    """One model shard's blocks in the mapped arena.

    Views point into memory shared with the daemon. Take them anew after LeaseLost: the arena may
    be another one.
    """

    def __init__(self, core: NamespaceCore) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"<Namespace of {self.spec}>"

    @property
    def spec(self) -> KVSpec:
        """What this namespace was opened with."""
        return self._core.spec

    @property
    def pool(self) -> Any:
        """All slots as bytes (u8 [slots, stride]); a block is the first ``spec.block_bytes``.

        A NumPy array; of a device tier on a GPU an object for ``torch.as_tensor`` and others that
        know ``__cuda_array_interface__``.
        """
        return self._core.memory.view

    @property
    def blocks(self) -> torch.Tensor:
        """All slots: [slots, layers, 2, block_tokens, kv_heads, head_dim], in both layouts.

        This, and all below, raises InvalidArgument for blocks that only their engine understands.
        """
        return self._paged.blocks

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer: [slots, block_tokens, kv_heads, head_dim]."""
        return self._paged.layer(layer)[:, 0]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer: [slots, block_tokens, kv_heads, head_dim]."""
        return self._paged.layer(layer)[:, 1]

    def write_kv(
        self,
        layer: int,
        sequence: SequenceViews,
        first_token: int,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Put ``k`` and ``v`` ([n, kv_heads, head_dim]) of the tokens from ``first_token`` on.

        Raises InvalidArgument unless these tokens are reserved.
        """
        self._paged.write(layer, sequence._core, first_token, k, v)

    def block_tables(self, sequences: Iterable[SequenceViews]) -> tuple[torch.Tensor, torch.Tensor]:
        """Block tables (i32 [B, longest], padded with slot 0) and token counts (i32 [B])."""
        return self._paged.block_tables([sequence._core for sequence in sequences])

    @cached_property
    def _paged(self) -> PagedPool:
        self.spec.require_plain()
        from tierkv.client.paged import PagedPool  # torch takes seconds: only who needs it

        return PagedPool(self._core)

    def _plan(
        self,
        layer: int,
        q: torch.Tensor,
        sequences: Iterable[SequenceViews],
        seq_lens: Items[int] | torch.Tensor | None,
        q_indptr: Items[int] | torch.Tensor | None,
        **options: Any,
    ) -> AttendPlan:
        cores = [sequence._core for sequence in sequences]
        return self._paged.plan(layer, q, cores, seq_lens, q_indptr, **options)
