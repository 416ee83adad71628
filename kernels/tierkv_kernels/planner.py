"""Cut the attention of one step into work records.

Decode, chunked prefill, split KV and a prefix shared by several sequences (cascade) differ only in
the records, so a kernel needs one code path. Each pair of query and key that the mask allows lies
in exactly one record, and no record reaches past its sequence's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv_kernels.errors import InvalidInput, require
from tierkv_kernels.work import NO_MASK, RECORD_DTYPE, Plan

Ints = npt.NDArray[np.int64]
Prefixes = tuple[tuple[int, int, int], ...]

INT32_MAX = 2**31 - 1
AUTO_CHUNK_MIN_TOKENS = 256
AUTO_CHUNK_STEP_TOKENS = 64
AUTO_WAVES = 2


def plan(
    seq_lens: npt.ArrayLike,
    q_lens: npt.ArrayLike | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    split: Literal["auto"] | int = "auto",
    shared_prefix: Sequence[tuple[int, int, int]] | None = None,
    causal: bool = True,
    window: int = -1,
    tile_rows: int = 0,
    num_workers: int = 1,
) -> Plan:
    """Plan one step. A plan depends on lengths alone: make it once and use it for every layer.

    seq_lens: [B] tokens of each sequence in the cache, its queries included.
    q_lens: [B] query tokens of each sequence; None: one each. Query ``i`` sits at position
        ``seq_len - q_len + i``.
    split: ``N``: cut keys at multiples of N tokens, so that the result of a sequence does not
        depend on its batch, bit for bit; 0: never; "auto": the shortest chunk of 256 tokens or more
        that keeps (records x KV heads) within two waves of ``num_workers``.
    shared_prefix: ``(first_sequence, num_sequences, num_tokens)`` of neighbours in the batch whose
        first ``num_tokens`` tokens lie in the same blocks, which are then read once for all of
        them. The prefix must end before the first query of each, and needs ``window=-1``.
    causal, window: as in ``paged_attention``; the plan holds for these values only.
    tile_rows: most query rows (tokens x query heads of one KV head) of a record, but always one
        token; 0: no limit. A backend may cut further, as rows are independent.
    num_workers: (record, KV head) pairs that run at once: resident thread blocks, or threads.

    Raises InvalidInput.
    """
    _check_geometry(num_q_heads, num_kv_heads, head_dim, block_size)
    require(
        -1 <= window <= INT32_MAX,
        f"window: got {window}, want 0 to 2**31 - 1, or -1 for none",
    )
    require(tile_rows >= 0, f"tile_rows: got {tile_rows}, want 0 (no limit) or more")
    require(num_workers >= 1, f"num_workers: got {num_workers}, want at least 1")
    require(
        split == "auto" or (isinstance(split, int) and split >= 0),
        f'split: got {split!r}, want "auto", 0 (never) or a number of tokens',
    )
    lens = _lengths("seq_lens", seq_lens)
    q_counts = np.ones_like(lens) if q_lens is None else _lengths("q_lens", q_lens)
    require(
        len(q_counts) == len(lens),
        f"q_lens: got {len(q_counts)} entries, want {len(lens)}, as many as seq_lens",
    )
    prefixes = _checked_prefixes(shared_prefix or (), lens - q_counts, window)

    q_indptr = np.concatenate(([0], np.cumsum(q_counts)))
    require(q_indptr[-1] <= INT32_MAX, f"q_lens: got {q_indptr[-1]} in all, want below 2**31")
    tile_tokens = max(1, tile_rows * num_kv_heads // num_q_heads) if tile_rows else INT32_MAX
    spans = _concat(
        _prefix_spans(prefixes, q_indptr, tile_tokens),
        _sequence_spans(lens, q_indptr, prefixes, tile_tokens, causal, window),
    )
    if split == "auto":
        chunk_tokens = _auto_chunk(spans, AUTO_WAVES * num_workers // num_kv_heads)
    else:
        chunk_tokens = split or INT32_MAX
    records, num_partials = _records(spans, chunk_tokens, causal, window)
    merge_tokens, merge_indptr, merge_rows = _merges(records)
    return Plan(
        records=records,
        num_partials=num_partials,
        merge_tokens=merge_tokens,
        merge_indptr=merge_indptr,
        merge_rows=merge_rows,
        seq_lens=lens.astype(np.int32),
        q_indptr=q_indptr.astype(np.int32),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        causal=causal,
        window=window,
        shared_prefix=prefixes,
    )


def _check_geometry(num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    for name, value in (
        ("num_q_heads", num_q_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("block_size", block_size),
    ):
        require(value >= 1, f"{name}: got {value}, want at least 1")
    require(
        num_q_heads % num_kv_heads == 0,
        f"num_q_heads: got {num_q_heads}, want a multiple of num_kv_heads={num_kv_heads}",
    )


def _lengths(name: str, values: npt.ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInput(
            f"{name}: got shape {array.shape} of {array.dtype}, want a list of integers"
        )
    lengths: Ints = array.astype(np.int64)
    require(
        not lengths.size or (lengths.min() >= 0 and lengths.max() <= INT32_MAX),
        f"{name}: got values outside 0 to 2**31 - 1",
    )
    return lengths


def _checked_prefixes(
    prefixes: Sequence[tuple[int, int, int]], first_positions: Ints, window: int
) -> Prefixes:
    """Sorted groups, without those that share nothing."""
    found = []
    free_from = 0
    for first, count, tokens in sorted(prefixes):
        what = f"shared_prefix: group ({first}, {count}, {tokens})"
        require(count >= 1 and tokens >= 0, f"{what}: want one sequence or more, 0 tokens or more")
        require(
            free_from <= first and first + count <= len(first_positions),
            f"{what}: want sequences {free_from} to {len(first_positions) - 1}, "
            "each in one group at most",
        )
        shortest = int(first_positions[first : first + count].min())
        require(
            tokens <= shortest,
            f"{what}: want at most {shortest} tokens, so that it ends before each first query",
        )
        free_from = first + count
        if tokens:
            found.append((first, count, tokens))
    require(not found or window == -1, f"shared_prefix: got window={window}, want window=-1")
    return tuple(found)


class _Spans(NamedTuple):
    """Row tiles before their keys are cut into chunks; fields as in Record."""

    q_tok: Ints
    n_tok: Ints
    table_row: Ints
    kv_begin: Ints
    kv_end: Ints
    pos0: Ints
    shares_tokens: Ints  # 1 where other spans have the same queries


def _concat(a: _Spans, b: _Spans) -> _Spans:
    return _Spans(*(np.concatenate(pair) for pair in zip(a, b, strict=True)))


def _pieces(counts: Ints) -> tuple[Ints, Ints]:
    """Lay ``counts[i]`` pieces of each i in a row: the i of each piece, and its number within i."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _tiles(begin: Ints, end: Ints, tile_tokens: int) -> tuple[Ints, Ints, Ints]:
    """Cut each range into tiles: the range, the first token and the length of each tile."""
    owner, nth = _pieces(-(-(end - begin) // tile_tokens))
    first = begin[owner] + nth * tile_tokens
    return owner, first, np.minimum(end[owner] - first, tile_tokens)


def _prefix_spans(prefixes: Prefixes, q_indptr: Ints, tile_tokens: int) -> _Spans:
    first, count, tokens = np.array(prefixes, dtype=np.int64).reshape(-1, 3).T
    owner, q_tok, n_tok = _tiles(q_indptr[first], q_indptr[first + count], tile_tokens)
    return _Spans(
        q_tok=q_tok,
        n_tok=n_tok,
        table_row=first[owner],
        kv_begin=np.zeros_like(q_tok),
        kv_end=tokens[owner],
        pos0=np.full_like(q_tok, NO_MASK),
        shares_tokens=np.ones_like(q_tok),
    )


def _sequence_spans(
    lens: Ints, q_indptr: Ints, prefixes: Prefixes, tile_tokens: int, causal: bool, window: int
) -> _Spans:
    prefix_tokens = np.zeros_like(lens)
    for first, count, tokens in prefixes:
        prefix_tokens[first : first + count] = tokens
    begin, end = q_indptr[:-1], q_indptr[1:]
    first_position = lens - (end - begin)
    # Queries that see nothing get records of their own: no live row shares a record with them, so a
    # kernel that writes the output itself never divides by an empty sum.
    blind = np.maximum(-first_position, 0) if causal else np.where(lens == 0, end - begin, 0)
    owner, q_tok, n_tok = _tiles(
        np.stack((begin, begin + blind), axis=1).ravel(),
        np.stack((begin + blind, end), axis=1).ravel(),
        tile_tokens,
    )
    live = owner % 2 == 1
    row = owner // 2
    pos0 = first_position[row] + q_tok - begin[row]
    kv_end = np.where(live, np.minimum(lens[row], pos0 + n_tok) if causal else lens[row], 0)
    kv_begin = prefix_tokens[row]
    if window >= 0:
        kv_begin = np.where(live, np.maximum(pos0 - window, 0), 0)
    return _Spans(
        q_tok=q_tok,
        n_tok=n_tok,
        table_row=row,
        kv_begin=kv_begin,
        kv_end=kv_end,
        pos0=pos0,
        shares_tokens=(prefix_tokens[row] > 0).astype(np.int64),
    )


def _chunk_counts(spans: _Spans, chunk_tokens: int) -> Ints:
    """Chunks of each span, cut at multiples of ``chunk_tokens``; one for a span without keys."""
    counts: Ints = -(-spans.kv_end // chunk_tokens) - spans.kv_begin // chunk_tokens
    return np.maximum(counts, 1)


def _auto_chunk(spans: _Spans, records_max: int) -> int:
    """The shortest chunk, in steps, with which there are ``records_max`` records at most."""
    longest = int(np.max(spans.kv_end - spans.kv_begin, initial=0))
    steps_min = AUTO_CHUNK_MIN_TOKENS // AUTO_CHUNK_STEP_TOKENS
    steps_max = max(steps_min, -(-longest // AUTO_CHUNK_STEP_TOKENS))
    if len(spans.q_tok) >= records_max:
        return INT32_MAX
    while steps_min < steps_max:
        steps = (steps_min + steps_max) // 2
        if _chunk_counts(spans, steps * AUTO_CHUNK_STEP_TOKENS).sum() <= records_max:
            steps_max = steps
        else:
            steps_min = steps + 1
    return steps_min * AUTO_CHUNK_STEP_TOKENS


def _records(
    spans: _Spans, chunk_tokens: int, causal: bool, window: int
) -> tuple[npt.NDArray[np.void], int]:
    counts = _chunk_counts(spans, chunk_tokens)
    owner, nth = _pieces(counts)
    chunk = (spans.kv_begin // chunk_tokens)[owner] + nth
    n_tok, pos0 = spans.n_tok[owner], spans.pos0[owner]
    kv_begin = np.maximum(spans.kv_begin[owner], chunk * chunk_tokens)
    kv_end = np.minimum(spans.kv_end[owner], (chunk + 1) * chunk_tokens)
    hides = np.zeros(len(owner), dtype=bool)
    if causal:
        hides |= kv_end - 1 > pos0
    if window >= 0:
        hides |= kv_begin < pos0 + n_tok - 1 - window
    hides &= (kv_end > kv_begin) & (pos0 != NO_MASK)
    partial = (counts > 1)[owner] | (spans.shares_tokens > 0)[owner]
    partial_rows = np.where(partial, n_tok, 0)

    records = np.empty(len(owner), RECORD_DTYPE)
    records["q_tok"] = spans.q_tok[owner]
    records["n_tok"] = n_tok
    records["table_row"] = spans.table_row[owner]
    records["kv_begin"] = kv_begin
    records["kv_end"] = kv_end
    records["pos0"] = np.where(hides, pos0, NO_MASK)
    records["part"] = np.where(partial, np.cumsum(partial_rows) - partial_rows, -1)
    return records, int(partial_rows.sum())


def _merges(
    records: npt.NDArray[np.void],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Which partial rows make up which token, as in Plan; prefix first, then in order of keys."""
    partial = records[records["part"] >= 0]
    if not len(partial):
        none = np.zeros(0, np.int32)
        return none, np.zeros(1, np.int32), none
    owner, nth = _pieces(partial["n_tok"].astype(np.int64))
    token_of_row = partial["q_tok"][owner] + nth
    rows = np.argsort(token_of_row, kind="stable")
    tokens, counts = np.unique(token_of_row, return_counts=True)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    return tokens.astype(np.int32), indptr.astype(np.int32), rows.astype(np.int32)
