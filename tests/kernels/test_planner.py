"""Work records: what they cover, how they are cut, who writes what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tierkv_kernels import NO_MASK, InvalidInput, Plan, Record, plan

HEADS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
MASKS = [{"causal": causal, "window": window} for causal in (True, False) for window in (-1, 7)]


@dataclass(frozen=True)
class Step:
    """Arguments of plan()."""

    seq_lens: list[int]
    q_lens: list[int]
    options: dict[str, object]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    groups, seq_lens, q_lens = [], [], []
    sharing = draw(st.booleans())
    for _ in range(draw(st.integers(0, 5))):
        # A group that shares a prefix, or a single sequence that may have more queries than tokens.
        prefix = draw(st.integers(1, 70)) if sharing and draw(st.booleans()) else 0
        count = draw(st.integers(1, 3)) if prefix else 1
        if prefix:
            groups.append((len(seq_lens), count, prefix))
        for _ in range(count):
            q_len = draw(st.integers(0, 12))
            past = draw(st.integers(0, 90))
            if not prefix and draw(st.integers(0, 3)) == 0:
                past = -min(past % 5, q_len)
            seq_lens.append(prefix + past + q_len)
            q_lens.append(q_len)
    window = -1 if groups else draw(st.sampled_from((-1, 0, 1, 9, 60)))
    options = {
        "split": draw(st.one_of(st.just("auto"), st.integers(0, 50))),
        "shared_prefix": draw(st.permutations(groups)),
        "causal": draw(st.booleans()),
        "window": window,
        "tile_rows": draw(st.integers(0, 40)),
        "num_workers": draw(st.integers(1, 300)),
    }
    return Step(seq_lens, q_lens, options)


def make(step: Step) -> Plan:
    return plan(step.seq_lens, step.q_lens, **HEADS, **step.options)


def records_of(work: Plan) -> list[Record]:
    return [Record(*fields) for fields in work.records.tolist()]


def allowed_pairs(seq_len: int, q_len: int, causal: bool, window: int) -> np.ndarray:
    """[q_len, seq_len], pair by pair from the definition."""
    return np.array(
        [
            [
                (not causal or key <= position) and (window < 0 or key >= position - window)
                for key in range(seq_len)
            ]
            for position in range(seq_len - q_len, seq_len)
        ],
        dtype=bool,
    ).reshape(q_len, seq_len)


def covered_pairs(record: Record, causal: bool, window: int) -> np.ndarray:
    """[n_tok, kv_end - kv_begin]: what a kernel that knows only the record computes."""
    keys = np.arange(record.kv_begin, record.kv_end)[None, :]
    seen = np.ones((record.n_tok, keys.size), dtype=bool)
    if record.pos0 != NO_MASK:
        position = record.pos0 + np.arange(record.n_tok)[:, None]
        if causal:
            seen &= keys <= position
        if window >= 0:
            seen &= keys >= position - window
    return seen


@settings(deadline=None, max_examples=150)
@given(steps())
def test_each_allowed_pair_is_covered_exactly_once(step: Step) -> None:
    work = make(step)
    mask = {"causal": step.options["causal"], "window": step.options["window"]}
    starts = np.cumsum([0, *step.q_lens])
    sequence_of = np.repeat(np.arange(len(step.q_lens)), step.q_lens)
    longest = max(step.seq_lens, default=0)
    covered = np.zeros((starts[-1], longest), dtype=int)
    for record in records_of(work):
        rows = slice(record.q_tok, record.q_tok + record.n_tok)
        covered[rows, record.kv_begin : record.kv_end] += covered_pairs(record, **mask)
        for sequence in set(sequence_of[rows].tolist()) - {record.table_row}:
            assert any(
                first == record.table_row and sequence < first + count and record.kv_end <= tokens
                for first, count, tokens in work.shared_prefix
            )
    for row, (seq_len, q_len) in enumerate(zip(step.seq_lens, step.q_lens, strict=True)):
        rows = covered[starts[row] : starts[row + 1]]
        want = allowed_pairs(seq_len, q_len, **mask)
        assert np.array_equal(rows[:, :seq_len], want)
        assert not rows[:, seq_len:].any()


@settings(deadline=None, max_examples=100)
@given(steps())
def test_each_output_row_and_each_partial_row_has_one_writer(step: Step) -> None:
    work = make(step)
    outputs: list[int] = []
    partials: list[int] = []
    token_of_partial: dict[int, int] = {}
    for record in records_of(work):
        tokens = range(record.q_tok, record.q_tok + record.n_tok)
        if record.part == -1:
            outputs.extend(tokens)
        else:
            rows = range(record.part, record.part + record.n_tok)
            partials.extend(rows)
            token_of_partial.update(zip(rows, tokens, strict=True))
    outputs.extend(work.merge_tokens.tolist())
    assert sorted(outputs) == list(range(sum(step.q_lens)))
    assert sorted(partials) == list(range(work.num_partials))
    assert sorted(work.merge_rows.tolist()) == list(range(work.num_partials))
    assert work.merge_indptr[0] == 0
    assert work.merge_indptr[-1] == work.num_partials
    for m, token in enumerate(work.merge_tokens.tolist()):
        rows = work.merge_rows[work.merge_indptr[m] : work.merge_indptr[m + 1]].tolist()
        assert rows == sorted(row for row, of in token_of_partial.items() if of == token)


@settings(deadline=None, max_examples=100)
@given(steps())
def test_records_are_cut_as_asked(step: Step) -> None:
    work = make(step)
    split, tile_rows = step.options["split"], step.options["tile_rows"]
    for record in records_of(work):
        assert record.n_tok >= 1
        assert 0 <= record.kv_begin <= record.kv_end <= step.seq_lens[record.table_row]
        if tile_rows:
            assert record.n_tok <= max(1, tile_rows // 4)
        if split not in (0, "auto") and record.kv_begin < record.kv_end:
            assert record.kv_begin // split == (record.kv_end - 1) // split


@settings(deadline=None, max_examples=100)
@given(steps())
def test_only_records_that_hide_something_are_masked(step: Step) -> None:
    mask = {"causal": step.options["causal"], "window": step.options["window"]}
    for record in records_of(make(step)):
        if record.pos0 != NO_MASK:
            assert not covered_pairs(record, **mask).all()
        # A record that writes the output itself has no row that sees nothing among rows that do.
        if record.part == -1 and record.kv_begin < record.kv_end:
            assert covered_pairs(record, **mask).any(axis=1).all()


@pytest.mark.parametrize("mask", MASKS)
def test_a_single_query_is_never_masked(mask: dict[str, object]) -> None:
    work = plan([100, 1, 33], **HEADS, **mask, split=16)
    assert (work.records["pos0"] == NO_MASK).all()


@pytest.mark.parametrize("seq_lens", [[100_000], [4096] * 8, [300, 70_000, 5], [10] * 500])
@pytest.mark.parametrize("num_workers", [1, 16, 264])
def test_auto_split_fills_the_workers_and_no_more(seq_lens: list[int], num_workers: int) -> None:
    work = plan(seq_lens, **HEADS, num_workers=num_workers)
    pairs = len(work.records) * HEADS["num_kv_heads"]
    unsplit = len(seq_lens) * HEADS["num_kv_heads"]
    assert pairs <= max(2 * num_workers, unsplit)
    lengths = work.records["kv_end"] - work.records["kv_begin"]
    split = work.records["part"] >= 0
    if split.any():
        assert lengths.max() >= 256
    if unsplit < num_workers and lengths.max() > 512:
        assert pairs >= num_workers  # at least one full wave, as the chunks could be shorter


def test_a_shared_prefix_is_one_record_for_the_group() -> None:
    work = plan([100, 90, 80, 70], [1, 2, 1, 1], **HEADS, split=0, shared_prefix=[(1, 2, 64)])
    assert records_of(work) == [
        Record(q_tok=1, n_tok=3, table_row=1, kv_begin=0, kv_end=64, pos0=NO_MASK, part=0),
        Record(q_tok=0, n_tok=1, table_row=0, kv_begin=0, kv_end=100, pos0=NO_MASK, part=-1),
        Record(q_tok=1, n_tok=2, table_row=1, kv_begin=64, kv_end=90, pos0=88, part=3),
        Record(q_tok=3, n_tok=1, table_row=2, kv_begin=64, kv_end=80, pos0=NO_MASK, part=5),
        Record(q_tok=4, n_tok=1, table_row=3, kv_begin=0, kv_end=70, pos0=NO_MASK, part=-1),
    ]
    assert work.merge_tokens.tolist() == [1, 2, 3]
    assert work.merge_rows.tolist() == [0, 3, 1, 4, 2, 5]


def test_records_are_packed_int32() -> None:
    work = plan([5], **HEADS)
    assert work.records.dtype.itemsize == 28
    assert work.records.flags.c_contiguous


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("seq_lens: got shape (1, 1)", {"seq_lens": [[3]]}),
        ("seq_lens: got shape (2,) of float64", {"seq_lens": [3.0, 4.5]}),
        ("seq_lens: got values outside", {"seq_lens": [3, -1]}),
        ("seq_lens: got values outside", {"seq_lens": [3, 2**31]}),
        ("q_lens: got 1 entries, want 2", {"q_lens": [1]}),
        ("q_lens: got values outside", {"q_lens": [1, -1]}),
        ("q_lens: got 4294967294 in all", {"q_lens": [2**31 - 1, 2**31 - 1]}),
        ("num_q_heads: got 7, want a multiple of num_kv_heads=2", {"num_q_heads": 7}),
        ("num_kv_heads: got 0", {"num_kv_heads": 0}),
        ("head_dim: got 0", {"head_dim": 0}),
        ("block_size: got -1", {"block_size": -1}),
        ("num_workers: got 0", {"num_workers": 0}),
        ("window: got -2", {"window": -2}),
        ("window: got 2147483648, want 0 to 2**31 - 1", {"window": 2**31}),
        ("tile_rows: got -1", {"tile_rows": -1}),
        ("split: got -1", {"split": -1}),
        ("split: got 'never'", {"split": "never"}),
        ("shared_prefix: group (0, 3, 8)", {"shared_prefix": [(0, 3, 8)]}),
        ("shared_prefix: group (1, 1, 8)", {"shared_prefix": [(0, 2, 8), (1, 1, 8)]}),
        ("shared_prefix: group (-1, 1, 8)", {"shared_prefix": [(-1, 1, 8)]}),
        ("shared_prefix: group (0, 0, 8)", {"shared_prefix": [(0, 0, 8)]}),
        ("want at most 39 tokens", {"shared_prefix": [(0, 2, 40)]}),
        ("shared_prefix: got window=5", {"shared_prefix": [(0, 2, 8)], "window": 5}),
    ],
)
def test_bad_arguments_are_named(message: str, change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(**{"seq_lens": [40, 50], **HEADS, **change})
    assert message in str(caught.value)
