"""Slow requests are logged with their phases; samples and slow ones are traced."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from tierkv.obs.slow import Slow
from tierkv.obs.timeline import Phase, Timeline

MOVES = Timeline(
    verb="acquire",
    code="ok",
    began_s=100.0,
    seconds=1.0,
    phases=[
        Phase("queued", 100.0, 0.125),
        Phase("disk_to_device", 100.25, 0.25, 3),
        Phase("disk_to_device", 100.5, 0.25, 4),
        Phase("log", 100.75, 0.125),
    ],
    ids={"request": 7, "lease": 2, "sequence": 5},
)


def test_time_by_phase_and_what_is_left_was_spent_deciding() -> None:
    assert MOVES.totals() == {
        "plan_s": 0.25,
        "queued_s": 0.125,
        "disk_to_device_s": 0.5,
        "disk_to_device_blocks": 7,
        "log_s": 0.125,
    }


def test_a_slow_request_is_logged_with_its_phases_and_ids(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(0.5)
    assert slow.wants(MOVES.seconds)
    slow.tell(MOVES)
    (record,) = caplog.records
    assert record.getMessage() == "slow request: acquire"
    assert record.levelno == logging.WARNING
    expected = {"code": "ok", "took_s": 1.0, "disk_to_device_s": 0.5, "request": 7, "lease": 2}
    assert expected.items() <= vars(record).items()


def test_of_a_request_that_is_to_wait_nobody_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Slow(0.5).tell(dataclasses.replace(MOVES, verb="flush", patient=True))
    (record,) = caplog.records
    assert (record.getMessage(), record.levelno) == ("slow request: flush", logging.INFO)


def test_a_quick_one_is_not_wanted() -> None:
    assert not Slow(0.5).wants(0.499)


def test_the_limit_may_be_changed_while_it_runs() -> None:
    slow = Slow(0.5)
    slow.slow_s = 0.1
    assert slow.wants(0.2)


def test_samples_are_traced_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    traced: list[Timeline] = []
    slow = Slow(10.0, traced.append, sample_every=3)
    for _ in range(9):
        if slow.wants(MOVES.seconds):
            slow.tell(MOVES)
    assert traced == [MOVES] * 3
    assert not caplog.records


def test_slow_ones_are_traced_beside_the_samples() -> None:
    traced: list[Timeline] = []
    slow = Slow(0.5, traced.append, sample_every=1000)
    assert slow.wants(MOVES.seconds)
    slow.tell(MOVES)
    assert traced == [MOVES]
