"""All that the core is given of the library."""

from __future__ import annotations

import functools

from tierkv.core.structures import Structures
from tierkv.native.library import Library
from tierkv.native.shortcuts import NativeShortcuts
from tierkv.native.structures import NativeBlocks, NativeLru, NativeSlotSet
from tierkv.native.table import NativeTable


def structures(library: Library) -> Structures:
    """Native structures, and the planner's shortcuts on them."""
    return Structures(
        blocks=functools.partial(NativeBlocks, library),
        slots=functools.partial(NativeSlotSet, library),
        table=functools.partial(NativeTable, library),
        lru=functools.partial(NativeLru, library),
        shortcuts=NativeShortcuts(library),
    )
