"""Consecutive slots, so that neighbours share one system call."""

from __future__ import annotations

import numpy as np

from tierkv.core.ids import I64, U32


def consecutive_runs(slots: U32, *, length_max: int, boundary: int | None = None) -> list[I64]:
    """Split a request into runs of consecutive slots.

    Each run is an i64 array of indices into ``slots`` (shape [n]), in ascending order of slot. No
    run has more than ``length_max`` slots or reaches across a multiple of ``boundary``.
    """
    order = np.argsort(slots, kind="stable")
    ascending = slots[order].astype(np.int64)
    apart = np.diff(ascending) != 1
    if boundary is not None:
        apart |= ascending[1:] % boundary == 0
    stretches = np.split(order, np.flatnonzero(apart) + 1)
    return [
        stretch[start : start + length_max]
        for stretch in stretches
        for start in range(0, len(stretch), length_max)
    ]
