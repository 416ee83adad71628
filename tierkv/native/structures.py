"""Blocks, slot sets and orders of eviction of the core, with the library's loops.

What is done to many rows or slots at once is one call, whatever their number: numpy takes ten, each
of them a microsecond or more where caches are cold.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tierkv.core.blocks import PLACED_TWICE, Blocks
from tierkv.core.ids import I64, U32, U64, Bool, Tier
from tierkv.core.policy import Lru
from tierkv.core.records import Records
from tierkv.core.slots import NOT_USED, TAKEN_TWICE, SlotSet
from tierkv.core.space import STEP, stretched
from tierkv.errors import InvariantViolation
from tierkv.native.library import Library
from tierkv.native.memory import LastingAddresses, address

OTHER_BLOCK, NOT_SO = -2, -3
"""What the library returns beside numbers and, for a row that is not there, -1."""

_COLUMNS = ("id", "parent", "hash_hi", "hash_lo", "sum_hi", "sum_lo", "namespace", "flags")
_COUNTS = ("refs", "active", "_where")


class _BlocksInC(ctypes.Structure):
    """``Blocks`` of rows.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_COLUMNS, *_COUNTS)),
        ("slot", ctypes.c_void_p * len(Tier)),
        ("length", ctypes.c_uint64),
    ]


class _SlotsInC(ctypes.Structure):
    """``Slots`` of rows.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "stack")),
        *((name, ctypes.c_int64) for name in ("depth", "used", "held")),
    ]


class _TouchesInC(ctypes.Structure):
    """``Touches`` of rows.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("log", "entry")),
        *((name, ctypes.c_uint64) for name in ("head", "tail", "to", "moving")),
        ("listed", ctypes.c_int64),
    ]


class NativeBlocks(Blocks):
    """See Blocks."""

    def __init__(self, library: Library, room: int = STEP) -> None:
        self._library = library.quick
        self._in_c = _BlocksInC()
        self._at = ctypes.addressof(self._in_c)
        super().__init__(room)

    def ensure(self, rows: int) -> None:
        """See Blocks."""
        if rows <= len(self):
            return
        super().ensure(rows)
        for name in (*_COLUMNS, *_COUNTS):
            setattr(self._in_c, name, address(getattr(self, name)))
        self._in_c.slot[:] = [address(one) for one in self.slot]
        self._in_c.length = len(self)

    def lent(self) -> int:
        """Where the library finds the columns, until there are more rows."""
        return self._at

    def alloc(self, records: Records) -> None:
        """See Blocks."""
        done = self._library.tierkv_rows_alloc(self._at, address(records), len(records))
        _require(done, PLACED_TWICE)

    def may_seal(self, records: Records) -> tuple[I64, U64, U64]:
        """See Blocks."""
        count = len(records)
        rows = np.empty(count, np.int64)
        hash_hi, hash_lo = np.empty(count, np.uint64), np.empty(count, np.uint64)
        may = self._library.tierkv_rows_may_seal(
            *(self._at, address(records), count),
            *(address(rows), address(hash_hi), address(hash_lo)),
        )
        _require(may, "a block was sealed twice")
        return rows, hash_hi, hash_lo

    def seal(self, records: Records) -> None:
        """See Blocks."""
        self._library.tierkv_rows_seal(self._at, address(records), len(records))

    def drop(self, records: Records) -> I64:
        """See Blocks."""
        gone = np.empty(len(records), np.int64)
        count = self._library.tierkv_rows_drop(
            self._at, address(records), len(records), address(gone)
        )
        return gone[: _require(count, "a copy was dropped that is not there")]

    def ref(self, rows: U32, *, active: bool) -> None:
        """See Blocks."""
        rows = np.ascontiguousarray(rows, np.uint32)
        _require(self._library.tierkv_rows_ref(self._at, address(rows), len(rows), active))

    def unref(self, rows: I64, *, active: bool) -> I64:
        """See Blocks."""
        idle = np.empty(len(rows), np.int64)
        count = self._library.tierkv_rows_unref(
            self._at, address(rows), len(rows), active, address(idle)
        )
        return idle[: _require(count)]

    def free(self, rows: I64) -> list[I64]:
        """See Blocks."""
        slots = np.empty((len(Tier), len(rows)), np.int64)
        counts = np.empty(len(Tier), np.int64)
        rows = np.ascontiguousarray(rows)
        done = self._library.tierkv_rows_free(
            *(self._at, address(rows), len(rows), address(slots), address(counts))
        )
        _require(done)
        return [of[:count] for of, count in zip(slots, counts.tolist(), strict=True)]

    def count_tiers(self, rows: I64) -> list[int]:
        """See Blocks."""
        counts = np.zeros(len(Tier) + 1, np.int64)
        done = self._library.tierkv_rows_count(self._at, address(rows), len(rows), address(counts))
        _require(done)
        in_tier: list[int] = counts[:-1].tolist()
        return in_tier

    def may_leave(self, rows: I64, tier: Tier) -> Bool:
        """See Blocks."""
        may = np.empty(len(rows), np.bool_)
        done = self._library.tierkv_rows_may_leave(
            self._at, address(rows), len(rows), tier, address(may)
        )
        _require(done)
        return may


class NativeSlotSet(SlotSet):
    """See SlotSet."""

    def __init__(self, library: Library, capacity: int, room: int | None = None) -> None:
        super().__init__(capacity, room)
        self._library = library.quick
        self._lasting = LastingAddresses()
        self._in_c = _SlotsInC()
        self._at = ctypes.addressof(self._in_c)

    def lent(self, freed_max: int = 0) -> int:
        """Where the library finds it, which may free so many numbers; until ``returned``."""
        self._stack = stretched(self._stack, self._depth + freed_max)
        in_c = self._in_c
        in_c.states, in_c.stack = self._lasting(self._is), self._lasting(self._stack)
        in_c.depth, in_c.used, in_c.held = self._depth, self.used_count, self.held_count
        return self._at

    def returned(self) -> None:
        """Take over what the library has changed. Mutates."""
        in_c = self._in_c
        self._depth, self.used_count, self.held_count = in_c.depth, in_c.used, in_c.held

    def _pop(self, count: int) -> I64:
        held = np.empty(count, np.int64)
        depth = ctypes.c_int64(self._depth)
        found = self._library.tierkv_slots_hold(
            *(self._lasting(self._is), self._lasting(self._stack)),
            *(ctypes.byref(depth), count, address(held)),
        )
        self._depth = depth.value
        return held[:found]

    def _use(self, numbers: I64) -> int:
        numbers = np.ascontiguousarray(numbers)
        held = self._library.tierkv_slots_take(*self._states(), address(numbers), len(numbers))
        return _require(held, TAKEN_TWICE)

    def _set_free(self, numbers: I64, were: int) -> int:
        numbers = np.ascontiguousarray(numbers)
        freed = np.empty(len(numbers), np.uint32)
        count = self._library.tierkv_slots_free(
            *(*self._states(), address(numbers), len(numbers), were, address(freed))
        )
        if count < 0:
            raise InvariantViolation(NOT_USED)
        self._push(freed[:count])
        return int(count)

    def _states(self) -> tuple[int, int]:
        return self._lasting(self._is), len(self._is)


class NativeLru(Lru):
    """See Lru."""

    def __init__(self, library: Library, room: int) -> None:
        super().__init__(room)
        self._library = library.quick
        self._lasting = LastingAddresses()
        self._in_c = _TouchesInC()
        self._at = ctypes.addressof(self._in_c)

    def lent(self) -> int:
        """Where the library finds it, until ``returned``. Mutates: enters the latest touches."""
        self._enter()
        in_c = self._in_c
        in_c.log, in_c.entry = self._lasting(self._log), self._lasting(self._entry)
        in_c.head, in_c.tail, in_c.to = self._head, self._tail, self._to
        in_c.moving, in_c.listed = self._from, self._listed
        return self._at

    def returned(self) -> None:
        """Take over what the library has changed. Mutates."""
        self._head, self._listed = self._in_c.head, self._in_c.listed

    def _append(self, rows: I64) -> int:
        rows = np.ascontiguousarray(rows)
        return int(
            self._library.tierkv_touches_enter(
                *(self._lasting(self._log), self._tail, self._lasting(self._entry)),
                *(address(rows), len(rows)),
            )
        )

    def _strike(self, rows: I64) -> int:
        rows = np.ascontiguousarray(rows)
        return int(
            self._library.tierkv_touches_forget(
                self._lasting(self._entry), len(self._entry), address(rows), len(rows)
            )
        )

    def _live(self, start: int, stop: int) -> I64:
        rows = np.empty(stop - start, np.int64)
        count = self._library.tierkv_touches_live(
            *(self._lasting(self._log), start, stop, self._lasting(self._entry), address(rows))
        )
        return rows[:count]

    def _move(self, start: int, stop: int, to: int) -> int:
        return int(
            self._library.tierkv_touches_move(
                self._lasting(self._log), start, stop, to, self._lasting(self._entry)
            )
        )


def _require(result: int, not_so: str = "") -> int:
    """What the library returned. Raises InvariantViolation; IndexError for a row not there."""
    if result >= 0:
        return int(result)
    if result == OTHER_BLOCK:
        raise InvariantViolation("a record names a block that is gone")
    if result == NOT_SO:
        raise InvariantViolation(not_so)
    raise IndexError("no such row, slot or tier")
