"""Sizes, durations and ratios: what is read, what is refused and how it is written back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import units
from tierkv.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1_000", 1000),
        ("17 B", 17),
        ("64 MiB", 64 << 20),
        ("1GiB", 1 << 30),
        ("1.5 gib", 3 << 29),
        ("500MB", 500_000_000),
        ("2 kB", 2000),
        ("0.1 KB", 100),
        (" 3 TiB ", 3 << 40),
    ],
)
def test_reads_sizes(text: str, size_bytes: int) -> None:
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "is not a byte size"),
        ("lots", "is not a byte size"),
        ("-1", "is not a byte size"),
        ("1 MiB 2", "is not a byte size"),
        ("nan", "is not a byte size"),
        ("64M", "write 64 MiB (1024) or 64 MB (1000)"),
        ("64 QiB", "unknown unit 'QiB'"),
        ("0.3 B", "whole number of bytes"),
    ],
)
def test_refuses_what_is_not_a_size(text: str, advice: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        units.parse_bytes(text)
    assert advice in str(error.value)


@given(st.integers(0, 2**63))
def test_sizes_come_back_exactly(size_bytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(size_bytes)) == size_bytes


def test_sizes_are_written_in_the_largest_exact_unit() -> None:
    assert units.format_bytes(64 << 20) == "64 MiB"
    assert units.format_bytes(1025) == "1025 B"
    assert units.format_bytes(0) == "0 B"


def test_sizes_for_people_have_three_digits() -> None:
    assert units.about_bytes(1_570_000_000) == "1.46 GiB"
    assert units.about_bytes(1 << 20) == "1.00 MiB"
    assert units.about_bytes(999 << 10) == "999 KiB"
    assert units.about_bytes(12) == "12 B"


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("10s", 10.0),
        ("250ms", 0.25),
        ("250 ms", 0.25),
        ("5min", 300.0),
        ("1h 30min", 5400.0),
        ("1h30min", 5400.0),
        ("2d", 172_800.0),
        ("7us", 7e-6),
        ("7µs", 7e-6),
        ("12", 12.0),
        ("0", 0.0),
    ],
)
def test_reads_durations(text: str, duration_s: float) -> None:
    assert units.parse_duration(text) == duration_s


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "is not a duration"),
        ("soon", "is not a duration"),
        ("-1s", "is not a duration"),
        ("5m", "write 5min or 5ms"),
        ("5 weeks", "unknown unit 'weeks'"),
        ("inf", "is not a duration"),
    ],
)
def test_refuses_what_is_not_a_duration(text: str, advice: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        units.parse_duration(text)
    assert advice in str(error.value)


@given(st.floats(0, 1e9, allow_nan=False))
def test_durations_come_back_exactly(duration_s: float) -> None:
    assert units.parse_duration(units.format_duration(duration_s)) == duration_s


def test_durations_are_written_in_the_largest_exact_unit() -> None:
    assert units.format_duration(0.01) == "10ms"
    assert units.format_duration(90.0) == "90s"
    assert units.format_duration(300) == "5min"
    assert units.format_duration(0.0) == "0s"


def test_durations_for_people() -> None:
    assert units.about_duration(0.0000021) == "2.10 us"
    assert units.about_duration(0.0123) == "12.3 ms"
    assert units.about_duration(4.5) == "4.50 s"
    assert units.about_duration(125) == "2 min 05 s"
    assert units.about_duration(7500) == "2 h 05 min"
    assert units.about_duration(274_000) == "3 d 04 h"


def test_ratios_are_written_as_percentages() -> None:
    assert units.format_ratio(0.4) == "40%"
    assert units.format_ratio(0.995) == "99.5%"
