"""One forward pass of a batch: where its new KV goes, and what its queries see."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import numpy as np
import tierkv_kernels
import torch
from torch import Tensor

from tierkv.core.ids import I32, U32
from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers.history import I64, Flags
from tierkv.integrations.transformers.pooled import padded

P = ParamSpec("P")
R = TypeVar("R")


class Step:
    """``ids`` and ``real`` ([rows, Q]): the columns that are computed. ``tokens``: each row's, with
    those of these columns. ``kept``: how many leading ones of each row have their KV already.
    """

    def __init__(
        self,
        ids: I64,
        real: Flags,
        *,
        tokens: list[U32],
        kept: Items[int],
        blocks: Tensor,
        tables: Items[I32],
    ) -> None:
        self.ids = ids
        self.real = real
        self.tokens = tokens
        self._blocks = blocks
        self._waiting: int | None = None
        self._attended: set[int] = set()
        self._plans: dict[tuple[int, int], tierkv_kernels.Plan] = {}
        device = blocks.device
        lens = np.array([len(row) for row in tokens], np.int32)
        self._new = real.sum(1).astype(np.int32)
        self._tables = torch.from_numpy(padded(tables)).to(device)
        self._lens = torch.from_numpy(lens).to(device)
        bounds = np.concatenate(([0], np.cumsum(self._new))).astype(np.int32)
        self._bounds = torch.from_numpy(bounds).to(device)
        self._lens_here = lens
        self._rows = None if real.all() else _indices(real.ravel(), device)
        slots, places, missing = _places(lens - self._new, lens, kept, tables, blocks.shape[3])
        self._missing = None if missing.all() else _indices(missing, device)
        self._at = tuple(torch.from_numpy(each[missing]).to(device) for each in (slots, places))

    @property
    def positions(self) -> I64:
        """Each column's place among its row's tokens (i64 [rows, Q]); padding has some place."""
        before = self._lens_here - self._new
        places: I64 = before[:, None] + np.cumsum(self.real, 1, dtype=np.int64) - 1
        return np.maximum(places, 0)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's new keys and values, each [rows, kv_heads, Q, head_dim].

        Raises InvalidArgument if they are not what the pool holds.
        """
        held, heads, size = self._blocks.shape[1], *self._blocks.shape[4:]
        wanted = (len(self.real), heads, self.real.shape[1], size)
        if keys.shape != wanted or values.shape != wanted or not 0 <= layer < held:
            raise InvalidArgument(
                f"layer {layer} has keys {list(keys.shape)} and values {list(values.shape)}; the "
                f"pool holds {list(wanted)} in {held} layers: this model is not one that tierkv "
                "can serve"
            )
        if keys.dtype != self._blocks.dtype or keys.requires_grad:
            raise InvalidArgument(
                f"keys are {keys.dtype}{' with gradients' if keys.requires_grad else ''}; tierkv "
                f"holds {self._blocks.dtype}, for inference: run under torch.no_grad(), without "
                "autocast"
            )
        # Views of the pool that were first made in this mode can be written to in no other.
        with torch.inference_mode():
            for which, states in enumerate((keys, values)):
                rows = self._flat(states)
                if self._missing is not None:
                    rows = rows[self._missing]
                self._blocks[:, layer, which].index_put_(self._at, rows)
        self._waiting = layer

    def attend(
        self, query: Tensor, scale: float | None, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention of the layer written last; ``query`` [rows, heads, Q, head_dim].

        ``window``: how many keys a query sees, its own included; None: all. Returns [rows, Q,
        heads, head_dim]; padding gets zeros. Raises InvalidArgument if nothing was written.
        """
        layer, self._waiting = self._waiting, None
        if layer is None or layer in self._attended:
            raise InvalidArgument(
                "a layer attends without having put its keys into the cache: tierkv serves models "
                "whose every attention layer does, once in a forward pass"
            )
        self._attended.add(layer)
        pair = self._blocks[:, layer]
        reach = -1 if window is None else window - 1
        out, _ = tierkv_kernels.paged_attention(
            self._flat(query),
            pair[:, 0],
            pair[:, 1],
            self._tables,
            self._lens,
            q_indptr=self._bounds,
            plan=self._plan(query.shape[1], reach),
            scale=scale,
            window=reach,
            softcap=softcap or 0.0,
        )
        rows, heads, columns, size = query.shape
        if self._rows is None:
            return out.view(rows, columns, heads, size)
        full = torch.zeros((rows * columns, heads, size), dtype=out.dtype, device=out.device)
        full[self._rows] = out
        return full.view(rows, columns, heads, size)

    def check_complete(self) -> None:
        """Raise InvalidArgument unless every layer of the pool has been written and attended to."""
        layers = self._blocks.shape[1]
        if len(self._attended) != layers:
            raise InvalidArgument(
                f"{len(self._attended)} of {layers} layers used the cache in this forward pass"
            )

    def _flat(self, states: Tensor) -> Tensor:
        """[rows, heads, Q, head_dim] as [tokens, heads, head_dim], without padding."""
        flat = states.detach().transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
        return flat if self._rows is None else flat[self._rows]

    def _plan(self, heads: int, reach: int) -> tierkv_kernels.Plan:
        plan = self._plans.get((heads, reach))
        if plan is None:
            plan = self._plans[heads, reach] = tierkv_kernels.plan(
                self._lens_here,
                self._new,
                num_q_heads=heads,
                num_kv_heads=self._blocks.shape[4],
                head_dim=self._blocks.shape[5],
                block_size=self._blocks.shape[3],
                split=0,
                window=reach,
            )
        return plan


def _places(
    firsts: I32,
    ends: I32,
    kept: Items[int],
    tables: Items[I32],
    block_tokens: int,
) -> tuple[I64, I64, Flags]:
    """Of each row's tokens ``first`` .. ``end`` - 1 (all [tokens of all rows]): their slots, their
    places in these, and whether they are still to be written there.
    """
    at = [np.arange(first, end) for first, end in zip(firsts, ends, strict=True)]
    slots = [table[row // block_tokens] for table, row in zip(tables, at, strict=True)]
    missing = [row >= done for row, done in zip(at, kept, strict=True)]
    return (
        np.concatenate(slots).astype(np.int64),
        np.concatenate(at).astype(np.int64) % block_tokens,
        np.concatenate(missing),
    )


def _indices(flags: Flags, device: torch.device) -> Tensor:
    return torch.from_numpy(np.flatnonzero(flags)).to(device)


current: ContextVar[Step | None] = ContextVar("tierkv_step", default=None)
"""The forward pass that runs in this thread on a tierkv cache, if one does."""


def eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which torch.compile is to call as it is: what it reads changes."""
    disable: Callable[[Callable[P, R]], Callable[P, R]] = torch.compiler.disable
    return disable(function)
