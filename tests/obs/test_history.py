"""The samples that the status page shows of the past."""

from __future__ import annotations

from typing import Any

from tierkv.obs.history import COLUMNS, EVERY_S, History
from tierkv.obs.status import EvictionStatus, PrefixStatus, StatusDocument


def at(uptime_s: float, **fields: Any) -> StatusDocument:
    return StatusDocument(version="1", state="serving", uptime_s=uptime_s, **fields)


def test_it_begins_with_the_daemon() -> None:
    plain = History().plain()
    assert list(plain) == ["hour", "day"]
    assert plain["hour"] == {column: [0.0] for column in COLUMNS}


def test_a_sample_holds_the_counters() -> None:
    history = History()
    history.keep(
        at(
            240.0,
            prefix=PrefixStatus(lookup_tokens=9, hit_tokens_by_tier={"host": 4, "disk": 2}),
            evicted=[
                EvictionStatus(from_tier="device", to_tier="host", reason="r", blocks=3),
                EvictionStatus(from_tier="host", to_tier="none", reason="r", blocks=5),
                EvictionStatus(from_tier="disk", to_tier="none", reason="r", blocks=7),
            ],
        )
    )
    last = {column: values[-1] for column, values in history.plain()["day"].items()}
    assert last == {
        "uptime_s": 240.0,
        "lookup_tokens": 9,
        "device_hit_tokens": 0,
        "host_hit_tokens": 4,
        "disk_hit_tokens": 2,
        "moved_blocks": 3,
        "dropped_blocks": 12,
    }


def test_the_latest_hour_and_day_are_kept_and_no_more() -> None:
    history = History()
    for sample in range(1, 20_000):
        history.keep(at(sample * EVERY_S))
    end_s = 19_999 * EVERY_S
    for span, seconds in (("hour", 3_600), ("day", 86_400)):
        times = history.plain()[span]["uptime_s"]
        assert len(times) == 361
        assert times == sorted(times)
        assert times[-1] > end_s - 240
        assert 0 <= times[-1] - times[0] - seconds < 240


def test_a_late_clock_loses_no_sample() -> None:
    history = History()
    for sample in range(1, 11):
        history.keep(at(sample * (EVERY_S + 0.3) - 0.2))
    assert len(history.plain()["hour"]["uptime_s"]) == 11
