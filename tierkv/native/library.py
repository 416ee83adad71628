"""Finds the library of hot loops and checks that it was made from the sources beside it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.errors import ConfigError
from tierkv.native.build import LIBRARY, sources_digest

VARIABLE = "TIERKV_NATIVE"
"""Environment variable: "off" keeps to the loops in Python; "auto", as if unset, does not."""

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_MATRIX = (_POINTER, _SIZE, _SIZE)
"""Its address, the bytes from one row to the next, and how many rows it has."""
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_PLACES = (_POINTER, _U64)
"""Of a hash table or a directory: their address, and the mask of hashes."""
_COLUMN = (_POINTER, _SIZE)
"""Its address, and how many elements it has."""
_LIST = (_POINTER, _SIZE)
"""Of rows, numbers or records: its address, and how many there are."""

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tierkv_chain_hashes": (
        None,
        (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER),
    ),
    "tierkv_checksums": (ctypes.c_int, (*_MATRIX, _POINTER, _SIZE, _SIZE, _POINTER)),
    "tierkv_checks": (None, (*_MATRIX, _SIZE, _POINTER)),
    "tierkv_copy": (
        ctypes.c_int,
        (*_MATRIX, _POINTER, *_MATRIX, _POINTER, _SIZE, _SIZE, _POINTER),
    ),
    "tierkv_entries": (
        ctypes.c_int,
        (*_MATRIX, _POINTER, _SIZE, _POINTER, _U32, _U32, ctypes.c_char_p, _POINTER),
    ),
    "tierkv_entries_same": (
        ctypes.c_int,
        (*_MATRIX, _POINTER, _SIZE, _U32, _POINTER, _POINTER, _POINTER),
    ),
    "tierkv_places_get": (
        ctypes.c_int,
        (*_PLACES, _U64, _POINTER, *_COLUMN, _POINTER, _POINTER, _SIZE, _POINTER),
    ),
    "tierkv_linked": (
        ctypes.c_int64,
        (*_COLUMN, _POINTER, _POINTER, *_COLUMN, _U64, ctypes.c_uint16),
    ),
    "tierkv_chain": (
        ctypes.c_int64,
        (*[_POINTER] * 4, _SIZE, _U64, ctypes.c_uint16, _POINTER, _POINTER),
    ),
    "tierkv_places_put": (ctypes.c_int, (*_PLACES, *_COLUMN, _POINTER, _SIZE)),
    "tierkv_places_remove": (ctypes.c_int, (*_PLACES, *_COLUMN, _POINTER, _SIZE, _POINTER)),
    "tierkv_evict": (
        ctypes.c_int,
        (*[_POINTER] * 5, *[ctypes.c_uint] * 3, _SIZE, _POINTER, _POINTER),
    ),
    "tierkv_extend": (
        ctypes.c_int,
        (*[_POINTER] * 5, _SIZE, ctypes.c_uint, _U64, ctypes.c_uint16, _U64, _POINTER),
    ),
    "tierkv_seal": (ctypes.c_int, (_POINTER, *_LIST, _U64, *[_POINTER] * 8)),
    "tierkv_repeats": (ctypes.c_int, (_POINTER, _SIZE, _POINTER, _U64)),
    "tierkv_rows_alloc": (ctypes.c_int, (_POINTER, *_LIST)),
    "tierkv_rows_may_seal": (ctypes.c_int, (_POINTER, *_LIST, _POINTER, _POINTER, _POINTER)),
    "tierkv_rows_seal": (None, (_POINTER, *_LIST)),
    "tierkv_rows_count": (ctypes.c_int, (_POINTER, *_LIST, _POINTER)),
    "tierkv_rows_drop": (ctypes.c_int64, (_POINTER, *_LIST, _POINTER)),
    "tierkv_rows_ref": (ctypes.c_int, (_POINTER, *_LIST, ctypes.c_int)),
    "tierkv_rows_unref": (ctypes.c_int64, (_POINTER, *_LIST, ctypes.c_int, _POINTER)),
    "tierkv_rows_free": (ctypes.c_int, (_POINTER, *_LIST, _POINTER, _POINTER)),
    "tierkv_rows_may_leave": (ctypes.c_int, (_POINTER, *_LIST, ctypes.c_uint, _POINTER)),
    "tierkv_slots_hold": (ctypes.c_int64, (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER)),
    "tierkv_slots_take": (ctypes.c_int64, (*_COLUMN, *_LIST)),
    "tierkv_slots_free": (ctypes.c_int64, (*_COLUMN, *_LIST, ctypes.c_uint8, _POINTER)),
    "tierkv_touches_enter": (ctypes.c_int64, (_POINTER, _SIZE, _POINTER, *_LIST)),
    "tierkv_touches_forget": (ctypes.c_int64, (*_COLUMN, *_LIST)),
    "tierkv_touches_live": (ctypes.c_int64, (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER)),
    "tierkv_touches_move": (ctypes.c_int64, (_POINTER, _SIZE, _SIZE, _SIZE, _POINTER)),
    "tierkv_directory_enter": (
        ctypes.c_int,
        (*_PLACES, *_COLUMN, _POINTER, _POINTER, _SIZE),
    ),
    "tierkv_directory_leave": (ctypes.c_int, (_POINTER, *_COLUMN, _POINTER, _SIZE)),
    "tierkv_pages_in": (
        ctypes.c_int,
        (*_MATRIX, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER),
    ),
    "tierkv_pages_out": (ctypes.c_int, (*_MATRIX, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE)),
    "tierkv_read": (_SIZE, (*[_POINTER] * 5, _SIZE, _SIZE, *[_POINTER] * 3)),
}
"""What they return, and what they take."""


class NoLibrary(Exception):
    """The library is not to be used; the message says why. ``wanted``: somebody asked for that."""

    def __init__(self, why: str, *, wanted: bool = False) -> None:
        super().__init__(why)
        self.wanted = wanted


class Library:
    """The library's functions. Memory and sizes are for the caller to check.

    By ``bytes`` they free the GIL. By ``quick`` they do not: for what takes microseconds, for in a
    process with busy threads it may take a thousand times as long to get it back.
    """

    def __init__(self, path: Path) -> None:
        """Raises NoLibrary."""
        try:
            self.bytes = ctypes.CDLL(str(path))
            self.quick = ctypes.PyDLL(str(path))
        except OSError as error:
            raise NoLibrary(f"cannot load {path}: {error}") from error
        self._check(path)
        self._declare()

    def _check(self, path: Path) -> None:
        try:
            name = self.quick.tierkv_sources
        except AttributeError as error:
            raise NoLibrary(f"{path} is another library") from error
        name.restype = ctypes.c_char_p
        if name() != sources_digest().encode():
            raise NoLibrary(f"{path} was made from other sources: install tierkv again, or make")

    def _declare(self) -> None:
        for library in (self.bytes, self.quick):
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments


def load(environ: Mapping[str, str] = os.environ, path: Path = LIBRARY) -> Library:
    """The library at ``path``. Raises NoLibrary, ConfigError for another value of the variable."""
    asked = environ.get(VARIABLE, "auto")
    if asked == "off":
        raise NoLibrary(f"{VARIABLE} is off", wanted=True)
    if asked != "auto":
        raise ConfigError(f"{VARIABLE} is {asked!r}; it may be auto or off")
    if not path.exists():
        raise NoLibrary(f"there is no {path}: there was no C compiler when tierkv was installed")
    return Library(path)
