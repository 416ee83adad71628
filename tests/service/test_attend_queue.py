"""Which requests for attention make a round: of one kind, in turn, and not too many."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tierkv.service.attend_queue import ROUND_ROWS_MAX, TABLE_ENTRIES_MAX, Job, Kind, Queue

KIND = Kind(0, 2, 2, 32, 8, "float32", "NHD", 0, 4, 0.0, True, -1, 0.0)
OTHER = Kind(0, 2, 2, 32, 8, "float32", "NHD", 1, 4, 0.0, True, -1, 0.0)


def job(kind: Kind = KIND, rows: int = 1, sequences: int = 1, blocks: int = 1) -> Job:
    tables = np.broadcast_to(np.uint32(0), (sequences, blocks))
    q_indptr = np.linspace(0, rows, sequences + 1).astype(np.uint32)
    lens = np.full(sequences, blocks * kind.block_tokens, np.uint32)
    return Job(kind, tables, lens, q_indptr, None, mmap.mmap(-1, 1), 0, 0, 0)


def queued(*jobs: tuple[str, Job]) -> Queue:
    queue = Queue()
    for worker, one in jobs:
        queue.put(worker, one)
    return queue


def test_nothing_waits() -> None:
    assert Queue().take_round() == []
    assert len(Queue()) == 0


def test_all_of_the_leader_s_kind_come_along() -> None:
    a, b, c, d = job(), job(OTHER), job(), job(OTHER)
    queue = queued(("a", a), ("b", b), ("c", c), ("d", d))
    assert queue.take_round() == [a, c]
    assert len(queue) == 2
    assert queue.take_round() == [b, d]
    assert queue.take_round() == []


def test_a_worker_s_requests_of_several_kinds() -> None:
    a, b, c = job(), job(OTHER), job()
    queue = queued(("a", a), ("a", b), ("a", c))
    assert queue.take_round() == [a, c]
    assert queue.take_round() == [b]


def test_who_asks_for_much_does_not_keep_others_from_their_turn() -> None:
    long = [job(rows=ROUND_ROWS_MAX) for _ in range(3)]
    one, other = job(OTHER), job(OTHER)
    queue = queued(*(("greedy", each) for each in long), ("b", one), ("c", other))
    rounds = [queue.take_round() for _ in range(4)]
    assert rounds == [[long[0]], [one, other], [long[1]], [long[2]]]


def test_a_worker_that_found_no_room_leads_the_next_round() -> None:
    big, small, late = job(rows=ROUND_ROWS_MAX), job(), job()
    queue = queued(("a", small), ("b", big))
    assert queue.take_round() == [small]
    queue.put("a", late)
    assert queue.take_round() == [big]
    assert queue.take_round() == [late]


@pytest.mark.parametrize("rows", [1, 7, ROUND_ROWS_MAX])
def test_rows_of_a_round(rows: int) -> None:
    fit = ROUND_ROWS_MAX // rows
    jobs = [job(rows=rows) for _ in range(fit + 1)]
    queue = queued(*enumerate(jobs))
    assert queue.take_round() == jobs[:fit]
    assert queue.take_round() == jobs[fit:]


def test_a_request_with_more_rows_is_computed_alone() -> None:
    long, short = job(rows=ROUND_ROWS_MAX + 1), job()
    queue = queued(("a", long), ("b", short))
    assert queue.take_round() == [long]
    assert queue.take_round() == [short]


def test_the_table_of_a_round_is_bounded_by_its_longest_sequence() -> None:
    wide = job(blocks=TABLE_ENTRIES_MAX // 64)
    tall = job(rows=64, sequences=64)
    assert queued(("a", wide), ("b", tall)).take_round() == [wide]
    fits = job(rows=63, sequences=63)
    assert queued(("a", wide), ("b", fits)).take_round() == [wide, fits]


def test_whoever_has_gone_is_forgotten() -> None:
    a, b, c = job(), job(), job()
    queue = queued(("a", a), ("b", b), ("a", c))
    assert queue.drop("a") == [a, c]
    assert queue.drop("nobody") == []
    assert queue.take_round() == [b]


def test_a_scale_that_is_no_number_is_like_no_other() -> None:
    scales = [float("nan"), float("nan")]
    kinds = [Kind(0, 2, 2, 32, 8, "float32", "NHD", 0, 4, s, True, -1, 0.0) for s in scales]
    queue = queued(*((kind, job(kind)) for kind in kinds))
    assert len(queue.take_round()) == 1
