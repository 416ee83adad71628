"""What went wrong last, as the status document tells it."""

from __future__ import annotations

import io
import logging

import pytest

from tierkv.obs import log
from tierkv.obs.problems import Problems
from tierkv.obs.status import StatusDocument, from_plain, to_plain

LOGGER = logging.getLogger("tierkv.test_problems")


def warn(number: int) -> None:
    LOGGER.warning("sync %d is slow", number, extra={"lsn": number, "took_s": 1.23456789})


def test_warnings_and_errors_are_kept_with_their_ids_and_nothing_else() -> None:
    problems = Problems()
    with problems.watching():
        LOGGER.info("all is well")
        warn(7)
        LOGGER.error("the disk is gone", extra={"tier": "disk"})
    LOGGER.error("nobody looks any more")
    error, warning = problems.latest()
    assert (error.level, error.message, error.fields) == (
        "error",
        "the disk is gone",
        {"tier": "disk"},
    )
    assert (warning.level, warning.logger) == ("warning", "tierkv.test_problems")
    assert warning.message == "sync 7 is slow"
    assert warning.fields == {"lsn": "7", "took_s": "1.23457"}
    assert error.time_s >= warning.time_s > 0


def test_a_flood_of_one_kind_is_one_problem_with_a_count() -> None:
    problems = Problems(problems_max=2)
    with problems.watching():
        LOGGER.error("first")
        for number in range(1000):
            warn(number)
    flood, first = problems.latest()
    assert (flood.count, flood.message) == (1000, "sync 999 is slow")
    assert (first.count, first.message) == (1, "first")


def test_of_many_kinds_the_latest_are_kept() -> None:
    problems = Problems(problems_max=2)
    with problems.watching():
        LOGGER.error("first")
        LOGGER.error("second")
        LOGGER.error("third")
    assert [one.message for one in problems.latest()] == ["third", "second"]


def test_an_exception_is_named() -> None:
    problems = Problems()
    with problems.watching():
        try:
            raise ValueError("bad bytes")
        except ValueError:
            LOGGER.exception("attend failed")
    (one,) = problems.latest()
    assert one.fields == {"exception": "ValueError('bad bytes')"}


def test_nothing_of_it_is_lost_on_the_way_to_a_client(caplog: pytest.LogCaptureFixture) -> None:
    problems = Problems()
    with problems.watching():
        warn(1)
    document = StatusDocument(version="1", state="serving", problems=problems.latest())
    assert from_plain(to_plain(document)).problems == problems.latest()


def test_setting_up_the_log_anew_ends_nothing() -> None:
    problems = Problems()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with problems.watching():
        log.setup(stream=io.StringIO(), variables={})
        warn(1)
    root.handlers[:], root.level = handlers, level
    assert len(problems.latest()) == 1
