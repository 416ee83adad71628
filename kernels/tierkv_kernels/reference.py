"""The torch backend: correct first, and as fast as plain torch allows.

Each record gathers its blocks once and hands them to torch's own attention. The query heads that
share a KV head read it through an expanded view, so K and V are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tierkv_kernels.call import FP8, Call, check_shared_prefixes, check_table
from tierkv_kernels.merge import merge_rows
from tierkv_kernels.work import NO_MASK, Plan, Record

FOLDED_ROWS_MAX = 32
"""Most (query, head) rows of a KV head that are given to torch as one head."""

MASK_ELEMENTS = 1 << 22
"""Largest mask that is built at once, and most elements of masks that a plan keeps."""

SCORE_ELEMENTS = 1 << 19
"""Most scores of all heads that are held at once: what stays in a core's cache."""


def run(call: Call) -> None:
    """Fill ``call.out`` and ``call.lse``. Raises InvalidInput for a bad block table."""
    plan = call.plan
    table = call.block_table.cpu().numpy()
    check_table(table, plan, call.k_cache.shape[0])
    check_shared_prefixes(table, plan)
    shape = (plan.num_partials, *call.q.shape[1:])
    partial_out = call.q.new_empty(shape, dtype=torch.float32)
    partial_lse = partial_out.new_empty(shape[:2])
    for fields in plan.records.tolist():
        record = Record(*fields)
        if record.part < 0:
            rows = slice(record.q_tok, record.q_tok + record.n_tok)
            out, lse = call.out[rows], None if call.lse is None else call.lse[rows]
        else:
            rows = slice(record.part, record.part + record.n_tok)
            out, lse = partial_out[rows], partial_lse[rows]
        _run_record(call, record, table, out, lse)
    if plan.num_partials:
        _merge_partials(call, partial_out, partial_lse)
    if call.v_scale != 1.0:
        call.out.mul_(call.v_scale)


def _run_record(
    call: Call, record: Record, table: npt.NDArray[np.int32], out: Tensor, lse: Tensor | None
) -> None:
    """Write the record's rows of ``out`` [n_tok, Hq, D] and ``lse`` [n_tok, Hq]."""
    q = call.q[record.q_tok : record.q_tok + record.n_tok]
    num_keys = record.kv_end - record.kv_begin
    if num_keys == 0:
        _no_keys(out, lse)
        return
    keys, values = _gather(call, record, table)
    fused = lse is None and not call.softcap
    hides = record.pos0 != NO_MASK
    if fused and (not hides or _is_square(record, call.plan)):
        _fused(q, keys, values, call.score_scale, out, is_causal=hides)
        return
    if fused:
        rows_max = MASK_ELEMENTS // num_keys
    else:
        rows_max = SCORE_ELEMENTS // (num_keys * q.shape[1])
        keys, values = keys.float(), values.float()
    for rows in _tiles(record.n_tok, max(1, rows_max)):
        seen, mask = _visible(record, call.plan, rows, q)
        k, v = keys[:, seen], values[:, seen]
        row_lse = None if lse is None else lse[rows]
        if k.shape[1] == 0:
            _no_keys(out[rows], row_lse)
        elif fused:
            _fused(q[rows], k, v, call.score_scale, out[rows], mask)
        else:
            _explicit(call, q[rows], k, v, mask, out[rows], row_lse)


def _tiles(num_rows: int, rows_max: int) -> Iterator[slice]:
    for start in range(0, num_rows, rows_max):
        yield slice(start, min(start + rows_max, num_rows))


def _gather(call: Call, record: Record, table: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """The record's keys and values, each [Hkv, kv_end - kv_begin, D] in q's dtype.

    Views of the caches where the blocks lie one after another, else copies in the plan's scratch,
    which hold until the next record.
    """
    size = call.plan.block_size
    blocks = slice(record.kv_begin // size, -(-record.kv_end // size))
    begin = record.kv_begin - blocks.start * size
    tokens = slice(begin, begin + record.kv_end - record.kv_begin)
    slots = table[record.table_row, blocks]
    index = call.block_table[record.table_row, blocks]

    def gather(name: str, cache: Tensor) -> Tensor:
        raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # few operations know float8
        if _is_one_run(raw, slots):
            gathered = raw[slots[0] : slots[0] + len(slots)]
        else:
            gathered = _scratch(name, raw, call.plan)[: len(slots)]
            torch.index_select(raw, 0, index, out=gathered)
        wanted = gathered.flatten(0, 1)[tokens].transpose(0, 1)
        return wanted.view(cache.dtype).to(call.q.dtype) if cache.dtype == FP8 else wanted

    return gather("torch keys", call.k_cache), gather("torch values", call.v_cache)


def _scratch(name: str, cache: Tensor, plan: Plan) -> Tensor:
    """Room for the blocks of the longest sequence.

    Kept from layer to layer: fresh memory costs page faults, several times the copy itself.
    """
    room = plan.scratch.get(name)
    if room is None or room.dtype != cache.dtype or room.device != cache.device:
        num_blocks = -(-int(plan.seq_lens.max()) // plan.block_size)
        room = plan.scratch[name] = cache.new_empty(num_blocks, *cache.shape[1:])
    return cast(Tensor, room)


def _is_one_run(cache: Tensor, slots: npt.NDArray[np.int32]) -> bool:
    """Whether the tokens of these slots have one stride, in the order of the table."""
    if len(slots) < 2:
        return len(slots) == 1
    block_size = cache.shape[1]
    evenly_spaced = block_size == 1 or cache.stride(0) == block_size * cache.stride(1)
    return evenly_spaced and bool((slots[1:] - slots[:-1] == 1).all())


def _is_square(record: Record, plan: Plan) -> bool:
    """Whether the mask is a whole causal triangle, which torch knows without being given it."""
    return (
        plan.causal
        and record.pos0 == record.kv_begin
        and record.kv_end - record.kv_begin == record.n_tok
        and (plan.window < 0 or plan.window >= record.n_tok - 1)
    )


def _visible(record: Record, plan: Plan, rows: slice, q: Tensor) -> tuple[slice, Tensor | None]:
    """The record's keys that some of these rows see, and what to add to their scores."""
    begin, end = 0, record.kv_end - record.kv_begin
    if record.pos0 == NO_MASK:
        return slice(begin, end), None
    num_rows = rows.stop - rows.start
    first = record.pos0 + rows.start - record.kv_begin
    if plan.causal:
        end = min(end, first + num_rows)
    if plan.window >= 0:
        begin = max(begin, first - plan.window)
    if end <= begin:
        return slice(0, 0), None
    kept = plan.scratch.setdefault("torch masks", {})
    key = (first - begin, num_rows, end - begin, q.dtype, q.device)
    mask = kept.get(key)
    if mask is None:
        mask = _mask(first - begin, num_rows, end - begin, plan, q)
        if mask.numel() + sum(other.numel() for other in kept.values()) <= MASK_ELEMENTS:
            kept[key] = mask
    return slice(begin, end), mask


def _mask(first: int, num_rows: int, num_keys: int, plan: Plan, q: Tensor) -> Tensor:
    """[num_rows, num_keys] of 0 and -inf; row i sits at the position of key ``first + i``.

    This is what torch's attention adds to the scores; it would turn a mask of bools into this in
    every call.
    """
    mask = q.new_zeros(num_rows, num_keys)
    if plan.causal:
        later = mask[:, max(0, first + 1) :]
        later += torch.full_like(later, -torch.inf).triu_(min(0, first + 1))
    if plan.window >= 0:
        earlier = mask[:, : max(0, first + num_rows - 1 - plan.window)]
        earlier += torch.full_like(earlier, -torch.inf).tril_(first - plan.window - 1)
    return mask


def _no_keys(out: Tensor, lse: Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


def _fused(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    out: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> None:
    """q, out: [T, Hq, D]. keys, values: [Hkv, N, D]. Every row must see a key."""
    grouped_q = _by_kv_head(q, keys.shape[0]).permute(1, 2, 0, 3)
    kv_heads, group, num_tokens, _ = grouped_q.shape
    if group * num_tokens <= FOLDED_ROWS_MAX and not is_causal:
        # The queries of a group as rows of one head: torch is slow at few rows per head.
        wide_q, keys, values = grouped_q.flatten(1, 2)[None], keys[None], values[None]
        mask = None if mask is None else mask.repeat(group, 1)
    else:
        # KV heads as the batch, so that a group's heads can read the same K and V by stride 0.
        shape = (kv_heads, group, *keys.shape[1:])
        wide_q = grouped_q
        keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
    got = scaled_dot_product_attention(
        wide_q, keys, values, mask, is_causal=is_causal, scale=scale
    ).view(grouped_q.shape)
    _by_kv_head(out, kv_heads).copy_(got.permute(2, 0, 1, 3))


def _explicit(
    call: Call,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """As ``_fused``, but with soft cap and log-sum-exp, and a row may see no key.

    keys, values: float32, and so is all that is computed.
    """
    grouped_q = _by_kv_head(q, keys.shape[0]).permute(1, 2, 0, 3)
    kv_heads, group, num_tokens, _ = grouped_q.shape
    scores = grouped_q.flatten(1, 2).float() @ keys.transpose(1, 2)
    scores *= call.score_scale
    if call.softcap:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if mask is not None:
        scores.view(kv_heads, group, num_tokens, -1).add_(mask)
    row_lse = scores.logsumexp(-1)
    if lse is not None:
        by_head = row_lse.view(kv_heads, group, num_tokens)
        lse.view(num_tokens, kv_heads, group).copy_(by_head.permute(2, 0, 1))
    row_lse.masked_fill_(row_lse == -torch.inf, 0.0)
    got = scores.sub_(row_lse[..., None]).exp_() @ values
    _by_kv_head(out, kv_heads).copy_(got.view(grouped_q.shape).permute(2, 0, 1, 3))


def _by_kv_head(rows: Tensor, kv_heads: int) -> Tensor:
    """Queries or outputs [T, Hq, D] as a view [T, Hkv, group, D]."""
    num_tokens, num_q_heads, head_dim = rows.shape
    return rows.view(num_tokens, kv_heads, num_q_heads // kv_heads, head_dim)


def _merge_partials(call: Call, partial_out: Tensor, partial_lse: Tensor) -> None:
    plan, device = call.plan, call.q.device
    rows = torch.from_numpy(plan.merge_rows).to(device)
    tokens = torch.from_numpy(plan.merge_tokens).to(device)
    counts = np.diff(plan.merge_indptr)
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device)
    merged, merged_lse = merge_rows(partial_out[rows], partial_lse[rows], owner, len(counts))
    call.out.index_copy_(0, tokens.long(), merged.to(call.out.dtype))
    if call.lse is not None:
        call.lse.index_copy_(0, tokens.long(), merged_lse)
