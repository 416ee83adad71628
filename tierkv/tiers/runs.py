"""Consecutive slots, so that neighbours share one system call."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tierkv.core.ids import I64, U32


def consecutive_runs(slots: U32, *, length_max: int, boundary: int | None = None) -> list[I64]:
    """Split a request into runs of consecutive slots.

    Each run is an i64 array of indices into ``slots`` (shape [n]), in ascending order of slot. No
    run has more than ``length_max`` slots or reaches across a multiple of ``boundary``.
    """
    order = np.argsort(slots, kind="stable")
    ascending = slots[order].astype(np.int64)
    places = np.arange(len(order))
    begins = np.ones(len(order), np.bool_)
    begins[1:] = np.diff(ascending) != 1
    if boundary is not None:
        begins |= ascending % boundary == 0
    begins |= (places - np.maximum.accumulate(np.where(begins, places, 0))) % length_max == 0
    cuts = [*np.flatnonzero(begins).tolist(), len(order)]
    return [order[first:end] for first, end in pairwise(cuts)]
