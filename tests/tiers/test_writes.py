"""Each way to carry out the pieces of a write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from tierkv.tiers.writes import SerialWrites, ThreadWrites, Writes

WAIT_S = 30.0


@pytest.fixture(params=["serial", "threads"])
def writes(request: pytest.FixtureRequest) -> Iterator[Writes]:
    with closing(SerialWrites() if request.param == "serial" else ThreadWrites(3)) as writes:
        yield writes


def test_each_piece_is_done_once_and_answers_in_its_place(writes: Writes) -> None:
    done: list[int] = []

    def job(piece: int) -> str:
        done.append(piece)
        return f"{piece} is done"

    assert writes.each(job, range(50)) == [f"{piece} is done" for piece in range(50)]
    assert sorted(done) == list(range(50))
    assert writes.each(job, []) == []


def test_an_error_reaches_whoever_asks(writes: Writes) -> None:
    def job(piece: int) -> None:
        raise ValueError(f"piece {piece}")

    with pytest.raises(ValueError, match="piece 1"):
        writes.each(job, [1])
    assert writes.each(abs, [-2]) == [2]


def test_threads_do_several_pieces_at_once() -> None:
    together = threading.Barrier(3)
    with closing(ThreadWrites(3)) as writes:
        assert sorted(writes.each(lambda _: together.wait(WAIT_S), range(3))) == [0, 1, 2]


def test_no_piece_goes_on_when_another_has_failed_and_whoever_asked_was_told() -> None:
    failing, ended = threading.Event(), []

    def job(piece: int) -> None:
        if piece == 0:
            failing.set()
            raise ValueError("piece 0")
        assert failing.wait(WAIT_S)
        ended.append(piece)

    with closing(ThreadWrites(3)) as writes:
        with pytest.raises(ValueError, match="piece 0"):
            writes.each(job, range(3))
        assert sorted(ended) == [1, 2]


def test_requests_of_several_threads_share_it() -> None:
    together = threading.Barrier(2)
    with closing(ThreadWrites(2)) as writes:

        def ask() -> None:
            assert len(writes.each(lambda _: together.wait(WAIT_S), range(1))) == 1

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not together.broken
