"""Finds the compiled kernel, checks that it was made from the sources beside it, picks a level."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv_kernels.cpu.build import LIBRARY, levels, sources_digest, symbol
from tierkv_kernels.errors import BackendUnavailable, InvalidInput

VARIABLE = "TIERKV_ISA"
"""Environment variable: the level to run, instead of the fastest that the machine has."""

HOW_TO_BUILD = (
    f"to build it: install a C compiler, then run python -P {Path(__file__).parent}/build.py"
)

BAD_TABLE, NO_MEMORY = 1, 2
"""What the kernel returns; 0 when all is done."""

_POINTER, _I64, _I32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Cache(ctypes.Structure):
    """``struct cache`` of src/attention.h."""

    _fields_ = (
        ("data", _POINTER),
        ("block_stride", _I64),
        ("token_stride", _I64),
        ("head_stride", _I64),
    )


class Attention(ctypes.Structure):
    """``struct attention`` of src/attention.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "out", "lse")),
        ("k", Cache),
        ("v", Cache),
        *((name, _POINTER) for name in ("block_table", "seq_lens", "records")),
        *((name, _POINTER) for name in ("merge_tokens", "merge_indptr", "merge_rows")),
        *((name, _I64) for name in ("q_stride", "q_head_stride", "out_stride", "out_head_stride")),
        *((name, _I64) for name in ("table_stride", "num_blocks", "num_sequences")),
        *((name, _I64) for name in ("num_records", "num_merges", "num_partials")),
        *((name, _I32) for name in ("q_type", "kv_type", "kv_heads", "group", "head_dim")),
        *((name, _I32) for name in ("block_size", "causal", "window")),
        *((name, _FLOAT) for name in ("score_scale", "softcap", "v_scale")),
    )


class Library:
    """The library's functions; addresses and sizes are for the caller to check."""

    def __init__(self, path: Path = LIBRARY) -> None:
        """Raises BackendUnavailable."""
        if not path.exists():
            raise BackendUnavailable(
                f'backend: the "cpu" kernel was not compiled ({path} is not there); {HOW_TO_BUILD}'
            )
        try:
            self._functions = ctypes.CDLL(str(path))
            self._functions.tierkv_sources.restype = ctypes.c_char_p
            made_from = self._functions.tierkv_sources()
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(f"backend: cannot load {path}: {error}") from error
        if made_from != sources_digest().encode():
            raise BackendUnavailable(f"backend: {path} was made from other sources; {HOW_TO_BUILD}")
        self.pool_new = self._function("tierkv_pool_new", _POINTER, ctypes.c_int)
        self.pool_forked = self._function("tierkv_pool_forked", None, _POINTER)
        self.pool_free = self._function("tierkv_pool_free", None, _POINTER)
        self._can_run = self._function("tierkv_can_run", ctypes.c_int, ctypes.c_char_p)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._functions, name)
        function.restype, function.argtypes = result, arguments
        return function

    def levels(self) -> list[str]:
        """What this machine can run, slowest first."""
        return [level for level in levels() if self._can_run(level.encode())]

    def attention(self, level: str) -> Any:
        """The level's ``tierkv_attention``: (pool, address of an Attention) -> result."""
        return self._function(symbol("attention", level), ctypes.c_int, _POINTER, _POINTER)

    def read(self, level: str) -> Any:
        """The level's ``tierkv_read``: (pool, data, offsets, count, bytes) -> sum of words."""
        types = (_POINTER, _POINTER, _POINTER, _I64, _I64)
        return self._function(symbol("read", level), ctypes.c_uint64, *types)


def choose_level(library: Library, environ: Mapping[str, str] = os.environ) -> str:
    """The level that the environment names, else the fastest.

    Raises BackendUnavailable, InvalidInput for a level that this CPU lacks.
    """
    can_run = library.levels()
    asked = environ.get(VARIABLE)
    if asked is None:
        if not can_run:
            raise BackendUnavailable(
                f'backend: the "cpu" kernel needs one of {", ".join(levels())}; this CPU has none'
            )
        return can_run[-1]
    if asked not in can_run:
        raise InvalidInput(
            f"{VARIABLE}: got {asked!r}, want one that this CPU has: {', '.join(can_run)}"
        )
    return asked
