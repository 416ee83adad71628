"""What the state keeps its rows and slots in: plain numpy, unless somebody has faster ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.core.blocks import Blocks
from tierkv.core.policy import Lru
from tierkv.core.shortcuts import NoShortcuts, Shortcuts
from tierkv.core.slots import SlotSet
from tierkv.core.table import HashTable


@dataclass(frozen=True)
class Structures:
    """How each is made. What replaces one does the same, and checks the same."""

    blocks: Callable[[int], Blocks] = Blocks
    slots: Callable[[int, int | None], SlotSet] = SlotSet
    table: Callable[[], HashTable] = HashTable
    lru: Callable[[int], Lru] = Lru
    shortcuts: Shortcuts = field(default_factory=NoShortcuts)
