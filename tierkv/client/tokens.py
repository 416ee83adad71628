"""Token ids as the worker has them, as the u32 array the protocol speaks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import U32
from tierkv.core.spec import TOKEN_ID_MAX
from tierkv.errors import InvalidArgument

TokenIds = Sequence[int] | npt.NDArray[Any] | Any
"""A list or tuple of int, an array.array, a 1-D numpy array, or a 1-D torch tensor."""


def token_array(token_ids: TokenIds, vocab_size: int = 0) -> U32:
    """``token_ids`` as a u32 array, shape [n]; may share memory with the argument.

    Raises InvalidArgument naming the first index that is no integer, negative, or not below
    ``vocab_size`` (0 = any id that fits 32 bits).
    """
    if isinstance(token_ids, str | bytes | bytearray):
        raise InvalidArgument(f"token ids are a sequence of integers, not {_kind(token_ids)}")
    if hasattr(token_ids, "detach") and hasattr(token_ids, "cpu"):
        token_ids = token_ids.detach().cpu().numpy()
    if isinstance(token_ids, np.ndarray | array):
        return _checked_array(np.asarray(token_ids), vocab_size)
    return _checked_sequence(token_ids, vocab_size)


def _checked_array(ids: npt.NDArray[Any], vocab_size: int) -> U32:
    if ids.ndim != 1:
        raise InvalidArgument(f"token ids have shape {list(ids.shape)}; they must have one axis")
    if not ids.size:
        return np.empty(0, np.uint32)
    if ids.dtype.kind not in "iu":
        raise InvalidArgument(f"token_ids[0] is {ids[0]} ({ids.dtype}); token ids are integers")
    if ids.dtype == np.uint32 and not vocab_size:
        return np.ascontiguousarray(ids)  # there is nothing that could be wrong
    limit = vocab_size or TOKEN_ID_MAX + 1
    if (ids.dtype.kind == "i" and int(ids.min()) < 0) or int(ids.max()) >= limit:
        index = int(np.flatnonzero((ids < 0) | (ids > limit - 1))[0])
        raise _out_of_range(index, int(ids[index]), limit)
    return np.ascontiguousarray(ids, np.uint32)


def _checked_sequence(token_ids: Sequence[int], vocab_size: int) -> U32:
    limit = vocab_size or TOKEN_ID_MAX + 1
    try:
        # array.array reads a list of ints three times as fast as numpy does.
        ids = np.frombuffer(array("I", token_ids), np.uint32) if len(token_ids) else None
    except (TypeError, OverflowError):
        raise _first_fault(token_ids, limit) from None
    if ids is None:
        return np.empty(0, np.uint32)
    if int(ids.max()) >= limit:
        index = int(np.flatnonzero(ids > limit - 1)[0])
        raise _out_of_range(index, int(ids[index]), limit)
    return ids


def _first_fault(token_ids: Any, limit: int) -> InvalidArgument:
    try:
        numbered = list(enumerate(token_ids))
    except TypeError:
        return InvalidArgument(f"token ids are a sequence of integers, not {_kind(token_ids)}")
    for index, value in numbered:
        if not hasattr(value, "__index__"):
            return InvalidArgument(
                f"token_ids[{index}] is {value!r} ({_kind(value)}); token ids are integers"
            )
        try:
            number = int(value.__index__())
        except TypeError:
            return InvalidArgument(f"token_ids[{index}] is {value!r}; token ids are integers")
        if not 0 <= number < limit:
            return _out_of_range(index, number, limit)
    return InvalidArgument(f"token ids are a sequence of integers, not {_kind(token_ids)}")


def _out_of_range(index: int, value: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"token_ids[{index}] is {value}; it must be at least 0 and below {limit}",
        index=index,
        value=value,
    )


def _kind(value: object) -> str:
    return type(value).__name__
