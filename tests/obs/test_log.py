"""Log lines in their three forms, and the limit on repeats."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.obs import log

LOGGER = logging.getLogger("tierkv.wal")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_logfmt_quotes_what_needs_it() -> None:
    stream = io.StringIO()
    log.setup(stream=stream, variables={})
    LOGGER.warning("slow %s", "sync", extra={"took_s": 1.23456789, "path": 'a "b"\nc', "empty": ""})
    (line,) = lines(stream)
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=warning logger=tierkv\.wal "
        r'msg="slow sync" took_s=1\.23457 path="a \\"b\\"\\nc" empty=""',
        line,
    )


def test_journald_gets_priorities_and_no_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with path.open("w") as stream:
        found = os.fstat(stream.fileno())
        variables = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        log.setup("debug", stream=stream, variables=variables)
        LOGGER.debug("a")
        LOGGER.info("b")
        LOGGER.warning("c")
        LOGGER.error("d")
        LOGGER.critical("e")
    written = path.read_text().splitlines()
    assert [line[:3] for line in written] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert written[1] == "<6>level=info logger=tierkv.wal msg=b"


def test_another_processes_journal_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as stream:
        log.setup(stream=stream, variables={"JOURNAL_STREAM": "1:2"})
        LOGGER.info("a")
    assert path.read_text().startswith("time=")


def test_a_traceback_stays_on_its_line() -> None:
    stream = io.StringIO()
    log.setup(stream=stream, variables={})
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        LOGGER.exception("failed")
    (line,) = lines(stream)
    assert 'exception="Traceback (most recent call last):\\n' in line


def test_json() -> None:
    stream = io.StringIO()
    log.setup("info", "json", stream=stream, variables={})
    try:
        raise ValueError("bad")
    except ValueError:
        LOGGER.exception("failed", extra={"lsn": 7, "path": Path("/x")})
    document = json.loads(stream.getvalue())
    assert document["exception"].endswith("ValueError: bad")
    assert {name: document[name] for name in ("level", "logger", "msg", "lsn", "path")} == {
        "level": "error",
        "logger": "tierkv.wal",
        "msg": "failed",
        "lsn": 7,
        "path": "/x",
    }


def test_text_on_a_terminal_in_colour() -> None:
    stream = Terminal()
    log.setup(stream=stream, variables={})
    LOGGER.info("ready", extra={"blocks": 3})
    LOGGER.error("lost")
    plain, coloured = lines(stream)
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO wal: ready blocks=3", plain)
    assert re.fullmatch(r"\x1b\[31m\d\d:\d\d:\d\d ERROR wal: lost\x1b\[0m", coloured)


def test_no_colour_if_not_wanted() -> None:
    stream = Terminal()
    log.setup(stream=stream, variables={"NO_COLOR": "1"})
    try:
        raise ValueError("bad")
    except ValueError:
        LOGGER.exception("lost")
    assert "\x1b" not in stream.getvalue()
    assert lines(stream)[-1] == "ValueError: bad"


def test_the_level_is_kept() -> None:
    stream = io.StringIO()
    log.setup("warning", stream=stream, variables={})
    LOGGER.info("not this")
    LOGGER.warning("this")
    assert len(lines(stream)) == 1


def test_repeats_are_counted_not_written() -> None:
    now_s = 0.0
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log.LogfmtFormatter(for_journald=True))
    handler.addFilter(log.RepeatFilter(repeats_max=2, period_s=10.0, clock=lambda: now_s))
    logger = logging.Logger("test")
    logger.addHandler(handler)

    def complain(number: int) -> None:
        logger.warning("again %d", number)

    for number in range(5):
        complain(number)
    logger.warning("something else")
    now_s = 10.0
    complain(5)
    complain(6)
    assert [line.partition("msg=")[2] for line in lines(stream)] == [
        '"again 0"',
        '"again 1"',
        '"something else"',
        '"again 5" suppressed=3',
        '"again 6"',
    ]
