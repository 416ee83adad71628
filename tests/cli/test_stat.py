"""``tierkv stat`` and the rates that it and ``tierkv top`` show."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from tierkv.cli import ask as ask_module
from tierkv.cli import stat as stat_module
from tierkv.cli.rates import between
from tierkv.cli.stat import StatLine, header, line_of, text
from tierkv.errors import NotReady, Unavailable
from tierkv.obs.status import EvictionStatus, PrefixStatus, StatusDocument, WalStatus, to_plain
from tierkv.rpc.messages import Request, Status

Run = Callable[..., tuple[int, str, str]]


def at(uptime_s: float, *, epoch: int = 1, tokens: int = 0, evicted: int = 0) -> StatusDocument:
    """A daemon that finds half of what is looked up."""
    document = StatusDocument(
        version="1",
        state="serving",
        epoch=epoch,
        uptime_s=uptime_s,
        sequences=2,
        prefix=PrefixStatus(
            lookup_tokens=tokens, hit_tokens_by_tier={"device": tokens // 4, "disk": tokens // 4}
        ),
        evicted=[
            EvictionStatus(from_tier="host", to_tier="disk", reason="r", blocks=evicted),
            EvictionStatus(from_tier="disk", to_tier="none", reason="r", blocks=evicted // 2),
        ],
        wal=WalStatus(appended_lsn=100 + tokens, written_lsn=98 + tokens, bytes=10 * tokens),
    )
    document.tiers["device"].capacity_bytes, document.tiers["device"].used_bytes = 1000, 500
    return document


def test_rates_are_what_grew_in_between() -> None:
    rates = between(at(10.0, tokens=100, evicted=10), at(12.0, tokens=900, evicted=30))
    assert rates.interval_s == 2.0
    assert rates.lookup_tokens == 400.0
    assert rates.hit_tokens == {"device": 100.0, "disk": 100.0}
    assert rates.hit_ratio == 0.5
    assert (rates.evicted_blocks, rates.dropped_blocks) == (15.0, 5.0)
    assert (rates.log_records, rates.log_bytes) == (400.0, 4000.0)


def test_a_daemon_that_was_restarted_has_counted_from_zero() -> None:
    rates = between(at(500.0, tokens=9000), at(2.0, epoch=2, tokens=100))
    assert rates.interval_s == 2.0
    assert rates.lookup_tokens == 50.0
    assert rates.log_records == 0


def test_nothing_looked_up_has_no_ratio() -> None:
    assert between(at(1.0), at(2.0)).hit_ratio == -1


def test_columns_are_as_wide_as_the_header() -> None:
    line = text(line_of(at(1.0), at(2.0, tokens=1000, evicted=4)))
    assert len(line) == len(header())
    assert line.split()[1:] == [
        "serving", "50%", "0%", "0%", "50%", "1000", "500", "6", "2", "9.77", "KiB", "2", "2", "0",
    ]  # fmt: skip
    assert len(text(StatLine(time_s=0.0, state="away"))) == len(header())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[StatusDocument | Exception]:
    """What a daemon says, one after the other; no time passes between."""
    waiting: list[StatusDocument | Exception] = []

    def ask(path: str, request: Request, timeout_s: float) -> Status:
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Status(to_plain(answer))

    monkeypatch.setattr(ask_module, "ask", ask)
    monkeypatch.setattr(stat_module.time, "sleep", lambda _seconds: None)
    return waiting


def test_one_line_an_interval(tierkv: Run, answers: list[StatusDocument | Exception]) -> None:
    answers += [at(1.0), at(2.0, tokens=10), at(3.0, tokens=30)]
    code, out, _ = tierkv("stat", "1", "2", "--socket", "/s")
    assert code == 0
    assert [line.split()[6] for line in out.splitlines()] == ["lookup/s", "10", "20"]


def test_json_lines(tierkv: Run, answers: list[StatusDocument | Exception]) -> None:
    answers += [at(1.0), at(2.0, tokens=10), Unavailable("gone"), at(1.0, epoch=2, tokens=5)]
    code, out, _ = tierkv("stat", "1", "3", "--json", "--socket", "/s")
    assert code == 0
    lines = [msgspec.json.decode(line, type=StatLine) for line in out.splitlines()]
    assert [line.state for line in lines] == ["serving", "away", "serving"]
    assert [line.rates is None for line in lines] == [False, True, False]
    for line, written in zip(lines, out.splitlines(), strict=True):
        assert msgspec.to_builtins(line) == json.loads(written)


@pytest.mark.parametrize(("error", "code"), [(Unavailable("none"), 3), (NotReady("not yet"), 75)])
def test_without_a_daemon_at_the_start_it_ends(
    tierkv: Run, answers: list[StatusDocument | Exception], error: Exception, code: int
) -> None:
    answers.append(error)
    assert tierkv("stat", "--socket", "/s")[:2] == (code, "")


@pytest.mark.parametrize("interval", ["nan", "inf", "0", "-1"])
def test_an_interval_that_never_ends_or_has_no_length_is_refused(
    tierkv: Run, interval: str
) -> None:
    for command in (("stat", "--", interval), ("top", f"--interval={interval}")):
        code, out, said = tierkv(*command)
        assert (code, out) == (2, "")
        assert interval in said
