"""The cache object that transformers' models and ``generate`` see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers.batch import Batch
from tierkv.integrations.transformers.step import current, eagerly


class TierKVCache(Cache):
    """A batch's keys and values in tierkv's pool, and nowhere else.

    ``Attached.cache()`` makes it; it begins empty and finds what is cached in the first forward
    pass. Where transformers counts, a length is one of columns: tokens and padding.
    """

    def __init__(self, batch: Batch, layers: int) -> None:
        super().__init__(layers=[_Layer(batch) for _ in range(layers)])
        self.batch = batch

    @property
    def cached_tokens(self) -> int:
        """Tokens, of all rows together, that were found cached and not computed."""
        return self.batch.cached_tokens

    @property
    def pooled(self) -> bool:
        """False while the KV lies in this process, because there is no daemon."""
        return self.batch.pooled

    def end(self) -> None:
        """Let go of the blocks; full ones stay cached. The cache cannot be used any more."""
        self.batch.end()

    @eagerly
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values into the pool, for the attention that comes next.

        Raises InvalidArgument outside of a forward pass of the attached model.
        """
        step = current.get()
        if step is None:
            raise InvalidArgument(
                "a tierkv cache is used by a model that is not attached: call attach(model) first, "
                "and call that model, not a part of it"
            )
        step.write(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far."""
        return self.batch.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns to be seen, from which one on."""
        return self.batch.columns + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-n`` columns; a positive number is the columns to keep, as it was
        before transformers 5.20.
        """
        keep = tokens_to_remove if tokens_to_remove > 0 else self.batch.columns + tokens_to_remove
        self.batch.crop(max(keep, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``i`` go on from what row ``beam_idx[i]`` was: beam search."""
        self.batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make ``repeats`` rows of each, next to each other."""
        self.batch.select([row for row in range(self.batch.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows (indices, or a bool for each row)."""
        rows = torch.arange(self.batch.rows)[indices.to("cpu")]
        self.batch.select(rows.tolist())

    def reset(self) -> None:
        """Begin anew."""
        self.batch.reset()

    def activate_past_recording(self) -> None:
        """Everything is kept anyway, so any ``crop`` is possible."""

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward pass."""
        return self.batch.rows or -1

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows."""
        return self.batch.rows > 0


class _Layer(CacheLayerMixin):
    """What transformers asks a single layer for; all layers know the same."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._batch = batch

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The pool is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raises InvalidArgument: the cache knows which layer it is, this object does not."""
        raise InvalidArgument("a layer of a tierkv cache is updated by itself: call cache.update()")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns to be seen, from which one on."""
        return self._batch.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns so far."""
        return self._batch.columns

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1
