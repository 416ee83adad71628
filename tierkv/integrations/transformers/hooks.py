"""What runs before and after each forward pass of an attached model.

Before: the columns are looked at, those that are cached are left out, and there is room for the
others. After: they have their names. If the daemon has lost what the pass is, or was, to be
computed on, the missing part is computed again, and nobody notices but for the time it takes.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers import weights
from tierkv.integrations.transformers.batch import Batch
from tierkv.integrations.transformers.cache import TierKVCache
from tierkv.integrations.transformers.history import I64, Flags
from tierkv.integrations.transformers.models import cache_argument
from tierkv.integrations.transformers.step import Step, current, eagerly

PIECE_COLUMNS = 512
"""Columns in one forward pass when KV is computed again: bounds the memory of activations."""

KNOWN = {
    *("input_ids", "attention_mask", "position_ids", "cache", "past_key_values"),
    *("logits_to_keep", "labels", "cache_position"),
}
"""Tensors that a forward pass may be given. Others could change what the tokens mean."""


class Hooks:
    """The two hooks of one model, on it from ``install`` to ``remove``."""

    def __init__(self, model: Any) -> None:
        self._parameters = list(inspect.signature(model.forward).parameters)
        self.cache_name = cache_argument(self._parameters)
        self._handles = [
            model.register_forward_pre_hook(eagerly(self._before), with_kwargs=True),
            model.register_forward_hook(eagerly(self._after), with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """The model is as it was."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        current.set(None)  # of a pass that was interrupted
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        cache = given.get(self.cache_name)
        if cache is None:
            cache = given.get("past_key_values")
        if not isinstance(cache, TierKVCache):
            return None
        given.pop("past_key_values", None)  # what older versions call it
        given[self.cache_name] = cache
        if model.training:
            raise InvalidArgument(
                "the model is in training mode, in which dropout changes keys and values: call "
                "model.eval() first"
            )
        batch = cache.batch
        ids, real = _columns(given, batch)
        if ids.shape[1] > 1 and batch.weights != weights.mark(model):
            raise InvalidArgument(
                "the model's weights have changed since this cache was made: make a new one"
            )
        if ids.shape[1] > 1 and weights.differ_by_row(model):
            raise InvalidArgument("tierkv serves one adapter for all rows, not adapter_names")
        keep = _wanted(model, given, ids.shape[1])
        positions = given.get("position_ids")
        step, skipped = self._prepare(model, cache, ids, real, keep)
        device = given["input_ids"].device
        right = torch.from_numpy(step.positions).to(device)
        if positions is not None:
            _check_positions(positions[..., skipped:], right, step.real)
        given["input_ids"] = given["input_ids"][:, skipped:]
        given["position_ids"] = right
        current.set(step)
        return (), given

    def _prepare(
        self, model: Any, cache: TierKVCache, ids: I64, real: Flags, keep: int
    ) -> tuple[Step, int]:
        """The step over these columns, and how many of them are left out as they are cached."""
        batch = cache.batch
        room = batch.settle(ids, real, keep)
        while room.first < batch.columns:
            self._compute_again(model, cache, room.first)
            room = batch.settle(ids, real, keep)
        skipped = room.first - batch.columns
        batch.skip(ids[:, :skipped], real[:, :skipped])
        return batch.step(ids[:, skipped:], real[:, skipped:], room), skipped

    def _compute_again(self, model: Any, cache: TierKVCache, first: int) -> None:
        """Compute the KV of the history from column ``first`` on."""
        device = next(model.parameters()).device
        ids, real = cache.batch.forget(first)
        mask = np.concatenate((cache.batch.real, real), 1)
        for begin in range(0, ids.shape[1], PIECE_COLUMNS):
            end = min(begin + PIECE_COLUMNS, ids.shape[1])
            model(
                input_ids=torch.from_numpy(ids[:, begin:end]).to(device),
                attention_mask=torch.from_numpy(mask[:, : first + end]).to(device),
                logits_to_keep=1,
                **{self.cache_name: cache},
            )

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        step = current.get()
        cache = kwargs.get(self.cache_name)
        if step is None or not isinstance(cache, TierKVCache):
            return None
        current.set(None)
        if output is None:  # it raised
            return None
        step.check_complete()
        if cache.batch.finish(step):
            return None
        return model(*args, **kwargs)


def _columns(given: dict[str, Any], batch: Batch) -> tuple[I64, Flags]:
    """The new columns' ids, and which of them are tokens. Raises InvalidArgument."""
    strange = [
        name for name, value in given.items() if name not in KNOWN and isinstance(value, Tensor)
    ]
    ids = given.get("input_ids")
    if ids is None or ids.ndim != 2 or strange:
        raise InvalidArgument(
            f"a tierkv cache takes input_ids [rows, columns] only, not {', '.join(strange)}"
            if strange
            else "a tierkv cache needs input_ids [rows, columns]: KV is found by token ids"
        )
    new: I64 = ids.cpu().numpy().astype(np.int64)
    mask = given.get("attention_mask")
    past = batch.columns
    if mask is None:
        mask = torch.ones((len(new), past + new.shape[1]), dtype=torch.bool)
    if mask.shape != (len(new), past + new.shape[1]):
        raise InvalidArgument(
            f"attention_mask is {list(mask.shape)}; a tierkv cache of {past} columns that gets "
            f"{new.shape[1]} more needs one of {[len(new), past + new.shape[1]]}"
        )
    real: Flags = mask.cpu().numpy() != 0
    if past and len(new) == batch.rows and not np.array_equal(real[:, :past], batch.real):
        raise InvalidArgument(
            "attention_mask differs from that of earlier forward passes in columns that are in the "
            "tierkv cache already"
        )
    return new, real[:, past:]


def _wanted(model: Any, given: dict[str, Any], columns: int) -> int:
    """For how many last columns the caller wants results: those cannot be left out."""
    keep = given.get("logits_to_keep")
    everything = (
        given.get("labels") is not None
        or given.get("output_hidden_states")
        or getattr(model.config, "output_hidden_states", False)
    )
    if everything or not isinstance(keep, int) or keep < 1:
        return columns
    return min(keep, columns)


def _check_positions(given: Tensor, right: Tensor, real: Flags) -> None:
    """Raise InvalidArgument unless each token's position is its place in its row."""
    tokens = torch.from_numpy(real).to(right.device)
    if given.ndim != 2 or not bool(((given == right) | ~tokens).all()):
        raise InvalidArgument(
            "position_ids are not the tokens' places in their rows; tierkv finds KV by the tokens "
            "before it, which holds for no other positions"
        )
