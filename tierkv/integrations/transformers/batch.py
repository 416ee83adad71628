"""What a cache holds: the columns a model was fed, and rows of KV in the pool or in this process.

The history is the truth and the KV its image. Where KV is missing, because the daemon lost it or
there is none, the hooks compute it again from the history (see ``hooks``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tierkv.client.sync import Namespace
from tierkv.core.ids import I32, U32
from tierkv.core.spec import KVSpec
from tierkv.errors import InvalidArgument, LeaseLost, TierkvError
from tierkv.integrations.transformers.history import I64, Flags, History
from tierkv.integrations.transformers.pooled import PooledRows
from tierkv.integrations.transformers.private import PrivateRows
from tierkv.integrations.transformers.step import Step

log = logging.getLogger(__name__)

LOSSES_MAX = 3
"""How often a batch is computed again because the daemon lost it, before it gives the daemon up."""


class Rows(Protocol):
    """Where a batch's KV lies: ``PooledRows`` or ``PrivateRows``."""

    @property
    def pooled(self) -> bool:
        """Whether that is the daemon's pool."""

    @property
    def blocks(self) -> Tensor:
        """[slots, layers, 2, block_tokens, kv_heads, head_dim]."""

    @property
    def kept(self) -> list[int]:
        """How many leading tokens of each row are there."""

    def make_room(self, tokens: list[U32], keep: int) -> list[I32]:
        """Room for all of each row's ``tokens``; returns block tables."""

    def record(self, tokens: list[U32]) -> None:
        """All of these tokens' KV is written."""

    def cut(self, counts: list[int]) -> None:
        """Keep at most so many tokens of each row."""

    def select(self, rows: Items[int]) -> None:
        """Let row ``i`` be what row ``rows[i]`` was."""

    def end(self) -> None:
        """Let go of all blocks."""


class Room(NamedTuple):
    """Room for the history and the next columns: each row's ``tokens`` and block table.

    ``first``: the first column that must be computed.
    """

    first: int
    tokens: list[U32]
    tables: list[I32]


class Batch:
    """``namespace`` is None where there is no daemon. ``on_loss`` hears why one was given up."""

    def __init__(
        self,
        spec: KVSpec,
        device: torch.device,
        namespace: Namespace | None,
        *,
        weights: int = 0,
        on_loss: Callable[[TierkvError], None] = lambda _error: None,
    ) -> None:
        self.weights = weights
        self.cached_tokens = 0
        self.ended = False
        self._spec = spec
        self._device = device
        self._namespace = namespace
        self._on_loss = on_loss
        self._history = History(0)
        self._rows: Rows = PrivateRows(spec, device, 0)
        self._losses = 0

    @property
    def columns(self) -> int:
        """How many columns the model has been fed, padding included."""
        return self._history.columns

    @property
    def rows(self) -> int:
        """How many sequences; 0 before the first forward pass."""
        return self._history.rows

    @property
    def pooled(self) -> bool:
        """Whether the KV lies in the daemon's pool, not in this process."""
        return self._rows.pooled

    @property
    def real(self) -> Flags:
        """Which columns are tokens, not padding (bool [rows, columns])."""
        return self._history.real

    # --- a forward pass ---------------------------------------------------------------------------

    def settle(self, ids: I64, real: Flags, keep: int) -> Room:
        """Make room for the history and these new columns, both [rows, n].

        The first column that must be computed is the first new one; or a later one, if the columns
        before it are cached, but of those at least ``keep`` are left; or a column of the history
        whose KV was lost. Raises InvalidArgument if the number of rows is another than before.
        """
        if self.ended:
            raise InvalidArgument("this cache has been ended: make another one")
        if not self.rows:
            self._begin(len(ids))
        if len(ids) != self.rows:
            raise InvalidArgument(
                f"{len(ids)} rows are fed to a cache of {self.rows}: use its "
                "batch_repeat_interleave() or batch_select_indices() first"
            )
        ahead = self._history.copy()
        ahead.append(ids, real)
        tokens = [ahead.tokens(row) for row in range(self.rows)]
        tables = self._make_room(tokens, keep)
        first = min(ahead.covered(self._rows.kept), ahead.columns - keep)
        if first < self.columns and self._rows.pooled:
            self._count_loss(LeaseLost("the daemon lost this batch again and again"))
            if not self._rows.pooled:
                return self.settle(ids, real, keep)
        return Room(first, tokens, tables)

    def skip(self, ids: I64, real: Flags) -> None:
        """These next columns ([rows, n]) need not be computed: they are cached."""
        self._history.append(ids, real)
        self.cached_tokens += int(real.sum())

    def forget(self, columns: int) -> tuple[I64, Flags]:
        """Drop the history's columns from ``columns`` on, to be computed anew; returns them."""
        ids, real = self._history.ids[:, columns:].copy(), self._history.real[:, columns:].copy()
        self._history.cut(columns)
        return ids, real

    def step(self, ids: I64, real: Flags, room: Room) -> Step:
        """The forward pass over these columns, which are the last ones that ``room`` is for."""
        return Step(
            ids,
            real,
            tokens=room.tokens,
            kept=self._rows.kept,
            blocks=self._rows.blocks,
            tables=room.tables,
        )

    def finish(self, step: Step) -> bool:
        """The KV of a step's columns is written: name it.

        Returns False if the daemon lost what the step was computed on: its result means nothing,
        and must be computed again.
        """
        try:
            self._rows.record(step.tokens)
        except InvalidArgument:
            raise
        except TierkvError as error:
            self._rows.cut(self._history.counts())
            if isinstance(error, LeaseLost):
                self._count_loss(error)
            else:
                self._go_private(error)
            return False
        self._history.append(step.ids, step.real)
        return True

    # --- between forward passes -------------------------------------------------------------------

    def crop(self, columns: int) -> None:
        """Keep the first ``columns`` columns."""
        self._history.cut(columns)
        self._rows.cut(self._history.counts())

    def select(self, rows: Items[int]) -> None:
        """Let row ``i`` be what row ``rows[i]`` was."""
        if not self.rows:
            return
        self._history.select(rows)
        try:
            self._rows.select(rows)
        except InvalidArgument:
            raise
        except TierkvError as error:
            log.info("rows are begun again: %s", error.message)

    def reset(self) -> None:
        """Forget everything; the next forward pass may have any number of rows."""
        self._rows.end()
        self._history = History(0)
        self._rows = PrivateRows(self._spec, self._device, 0)
        self.cached_tokens = 0

    def end(self) -> None:
        """Let go of all blocks; full ones stay cached. Calling it again does nothing."""
        self.ended = True
        self._rows.end()

    def _begin(self, rows: int) -> None:
        self._history = History(rows)
        if self._namespace is not None:
            self._rows = PooledRows(self._namespace, rows)
        else:
            self._rows = PrivateRows(self._spec, self._device, rows)

    def _make_room(self, tokens: list[U32], keep: int) -> list[I32]:
        try:
            return self._rows.make_room(tokens, keep)
        except InvalidArgument:
            raise
        except TierkvError as error:
            self._go_private(error)
            return self._rows.make_room(tokens, keep)

    def _count_loss(self, error: TierkvError) -> None:
        self._losses += 1
        if self._losses >= LOSSES_MAX:
            self._go_private(error)

    def _go_private(self, error: TierkvError) -> None:
        """Go on without the daemon: the pool's KV is computed again in this process' memory."""
        log.warning("this generation goes on without tierkv: %s", error.message)
        self._rows.end()
        self._namespace = None
        self._rows = PrivateRows(self._spec, self._device, self.rows)
        self._on_loss(error)
