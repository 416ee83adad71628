"""Where arrays lie, for the library."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy.typing as npt

LASTING_MAX = 16


def address(array: npt.NDArray[Any]) -> int:
    """Where an array lies."""
    try:
        # Three times as fast as asking numpy; only for what is writable, contiguous, not empty.
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):
        return array.ctypes.data


class LastingAddresses:
    """Addresses of arrays that are asked for again and again: columns, tables, pools.

    Keeps no array alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[npt.NDArray[Any]], int]] = {}

    def __call__(self, array: npt.NDArray[Any]) -> int:
        """Where a contiguous array lies."""
        known = self._known.get(id(array))
        if known is not None and known[0]() is array:
            return known[1]
        if len(self._known) >= LASTING_MAX:
            self._known.clear()
        self._known[id(array)] = weakref.ref(array), (found := address(array))
        return found
