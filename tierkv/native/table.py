"""The hash table of ``core.table``, probed and filled by the library."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, U64, Bool
from tierkv.core.table import HashTable, Places
from tierkv.errors import require
from tierkv.native.library import Library
from tierkv.native.memory import LastingAddresses, address
from tierkv.native.structures import NativeBlocks

QUICK_ROWS_MAX = 1 << 16
"""More rows than this are worth giving the GIL away for."""

FITS = "the hash table's rows are in its columns"


class _PlacesInC(ctypes.Structure):
    """``Places`` of rows.h."""

    _fields_ = [
        ("places", ctypes.c_void_p),
        ("mask", ctypes.c_uint64),
        ("count", ctypes.c_int64),
    ]


class NativeTable(HashTable):
    """The same table on places of the library, which follows chains as well."""

    def __init__(self, library: Library, places: int = 1024) -> None:
        super().__init__(places, functools.partial(NativePlaces, library))
        self._library = library
        self._lasting = LastingAddresses()
        self._in_c = _PlacesInC()
        self._at = ctypes.addressof(self._in_c)

    @property
    def grows(self) -> bool:
        """Whether rows are just moving to a larger array."""
        return self._old is not None

    def lent(self) -> int:
        """Where the library finds the array, while it does not grow; until ``returned``."""
        in_c = self._in_c
        in_c.places, in_c.count = self._lasting(self._now.values), self._count
        in_c.mask = len(self._now.values) - 1
        return self._at

    def returned(self) -> None:
        """Take over what the library has changed. Mutates."""
        self._count = self._in_c.count

    def repeats(self, halves: U64) -> bool:
        """See HashTable."""
        seen = np.zeros(1 << (2 * len(halves)).bit_length(), np.uint32)
        halves = np.ascontiguousarray(halves)
        return bool(
            self._library.quick.tierkv_repeats(
                address(halves), len(halves), address(seen), len(seen) - 1
            )
        )

    def get_chain(
        self, hi: U64, lo: U64, blocks: Blocks, namespace: int, parent: int
    ) -> tuple[I64, bool]:
        """See HashTable."""
        if self.grows or not isinstance(blocks, NativeBlocks):
            return super().get_chain(hi, lo, blocks, namespace, parent)
        rows, broken = np.empty(len(lo), np.int64), ctypes.c_uint8()
        hi, lo = np.ascontiguousarray(hi), np.ascontiguousarray(lo)
        count = self._library.quick.tierkv_chain(
            *(self.lent(), blocks.lent(), address(hi), address(lo), len(lo)),
            *(parent, namespace, address(rows), ctypes.addressof(broken)),
        )
        require(count >= 0, FITS)
        return rows[:count], bool(broken.value)

    def _linked(self, rows: I64, blocks: Blocks, namespace: int, parent: int) -> int:
        linked = self._library.quick.tierkv_linked(
            *(address(rows), len(rows)),
            *(self._lasting(blocks.id), self._lasting(blocks.parent)),
            *(self._lasting(blocks.namespace), len(blocks)),
            *(parent, namespace),
        )
        require(linked >= 0, FITS)
        return int(linked)


class NativePlaces(Places):
    """The same places; each call is one call of the library."""

    def __init__(self, library: Library, count: int) -> None:
        super().__init__(count)
        self._library = library
        self._lasting = LastingAddresses()

    def get(self, hi: U64, lo: U64, column_hi: U64, column_lo: U64) -> I64:
        """See Places."""
        require(len(hi) == len(lo) and len(column_hi) == len(column_lo), "keys have two halves")
        hi, lo = np.ascontiguousarray(hi, np.uint64), np.ascontiguousarray(lo, np.uint64)
        found = np.empty(len(lo), np.int64)
        failed = self._by(len(lo)).tierkv_places_get(
            *(*self._memory(), self.swept),
            *(self._lasting(column_hi), self._lasting(column_lo), len(column_lo)),
            *(address(hi), address(lo), len(lo), address(found)),
        )
        require(not failed, FITS)
        return found

    def put(self, rows: I64, column_lo: U64) -> None:
        """See Places."""
        rows = np.ascontiguousarray(rows, np.int64)
        failed = self._by(len(rows)).tierkv_places_put(
            *self._memory(),
            *(self._lasting(column_lo), len(column_lo), address(rows), len(rows)),
        )
        require(not failed, FITS)

    def remove(self, rows: I64, column_lo: U64) -> Bool:
        """See Places."""
        rows = np.ascontiguousarray(rows, np.int64)
        there = np.empty(len(rows), np.bool_)
        failed = self._by(len(rows)).tierkv_places_remove(
            *self._memory(),
            *(self._lasting(column_lo), len(column_lo)),
            *(address(rows), len(rows), address(there)),
        )
        require(not failed, FITS)
        return there

    def _memory(self) -> tuple[int, int]:
        return self._lasting(self.values), len(self.values) - 1

    def _by(self, rows: int) -> ctypes.CDLL:
        return self._library.quick if rows <= QUICK_ROWS_MAX else self._library.bytes
