"""What a batch was fed, column by column: the names of its KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import U32

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
COLUMNS_MIN = 256


class History:
    """The ids in every column of a batch, and which of them are tokens: the others are padding.

    transformers counts columns, tierkv the tokens of a row: where a row is padded they differ.
    """

    def __init__(self, rows: int) -> None:
        self.columns = 0
        self._ids: I64 = np.zeros((rows, COLUMNS_MIN), np.int64)
        self._real: Flags = np.zeros((rows, COLUMNS_MIN), np.bool_)

    def copy(self) -> History:
        """One that can be changed by itself."""
        other = History(0)
        other.columns, other._ids, other._real = self.columns, self._ids.copy(), self._real.copy()
        return other

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return len(self._ids)

    @property
    def ids(self) -> I64:
        """Token ids, padding included (i64 [rows, columns], a view)."""
        return self._ids[:, : self.columns]

    @property
    def real(self) -> Flags:
        """Which of them are tokens (bool [rows, columns], a view)."""
        return self._real[:, : self.columns]

    def append(self, ids: I64, real: Flags) -> None:
        """Add columns: both [rows, n]."""
        end = self.columns + ids.shape[1]
        if end > self._ids.shape[1]:
            room = max(end, 2 * self._ids.shape[1]) - self._ids.shape[1]
            self._ids = np.pad(self._ids, ((0, 0), (0, room)))
            self._real = np.pad(self._real, ((0, 0), (0, room)))
        self._ids[:, self.columns : end] = ids
        self._real[:, self.columns : end] = real
        self.columns = end

    def cut(self, columns: int) -> None:
        """Keep the first ``columns`` columns."""
        self.columns = min(columns, self.columns)

    def select(self, rows: Sequence[int]) -> None:
        """Let row ``i`` be what row ``rows[i]`` was."""
        self._ids, self._real = self._ids[list(rows)], self._real[list(rows)]

    def tokens(self, row: int) -> U32:
        """A row's tokens without padding (u32 [n])."""
        found: U32 = self.ids[row][self.real[row]].astype(np.uint32)
        return found

    def counts(self) -> list[int]:
        """How many tokens each row has."""
        return [int(count) for count in self.real.sum(1)]

    def covered(self, kept: Sequence[int]) -> int:
        """The most leading columns that hold no more than ``kept[row]`` tokens of each row."""
        counts = np.cumsum(self.real, 1)
        within = (counts <= np.asarray(kept).reshape(-1, 1)).all(0)
        return int(np.argmin(np.append(within, False)))
