"""What the kernels take, as in src/params.h, which says what each field is."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong, c_ulonglong
from typing import Any


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class AttentionParams(ctypes.Structure):
    """Of "paged_attention"."""

    _fields_ = (
        *_fields(
            c_ulonglong,
            "q k_cache v_cache block_table records out lse partial_out partial_lse",
        ),
        *_fields(
            c_longlong,
            "q_token_stride q_head_stride k_block_stride k_token_stride k_head_stride "
            "v_block_stride v_token_stride v_head_stride table_row_stride "
            "out_token_stride out_head_stride",
        ),
        *_fields(c_int, "num_records num_q_heads num_kv_heads block_size row_tiles causal window"),
        *_fields(c_float, "score_scale softcap v_scale"),
    )


class MergeParams(ctypes.Structure):
    """Of "merge_partials"."""

    _fields_ = (
        *_fields(
            c_ulonglong, "partial_out partial_lse merge_tokens merge_indptr merge_rows out lse"
        ),
        *_fields(c_longlong, "out_token_stride out_head_stride"),
        *_fields(c_int, "num_tokens num_q_heads"),
    )


class MovePiece(ctypes.Structure):
    """One of the pieces that "move_pieces" moves."""

    _fields_ = (*_fields(c_ulonglong, "source target bytes"),)


class MoveParams(ctypes.Structure):
    """Of "move_pieces"."""

    _fields_ = (*_fields(c_ulonglong, "pieces"), *_fields(c_int, "num_pieces spans"))


class WriteParams(ctypes.Structure):
    """Of "write_kv"."""

    _fields_ = (
        *_fields(c_ulonglong, "k v slots k_cache v_cache"),
        *_fields(
            c_longlong,
            "k_token_stride k_head_stride v_token_stride v_head_stride "
            "k_cache_block_stride k_cache_token_stride k_cache_head_stride "
            "v_cache_block_stride v_cache_token_stride v_cache_head_stride",
        ),
        *_fields(c_int, "num_tokens num_kv_heads block_size"),
        *_fields(c_float, "k_inverse_scale v_inverse_scale"),
    )
