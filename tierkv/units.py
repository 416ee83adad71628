"""Byte sizes, durations and ratios as people write them.

Reading is exact (no float rounding of sizes) and refuses what has two readings: "64M" could be MB
or MiB, "5m" a minute or a millisecond. Every ``parse_*`` raises InvalidArgument with what to write
instead.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from tierkv.errors import InvalidArgument

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_BINARY_UNITS = {"TiB": TiB, "GiB": GiB, "MiB": MiB, "KiB": KiB}
_DECIMAL_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
_BYTES_BY_UNIT = {
    "": 1,
    "b": 1,
    **{unit.lower(): size for unit, size in (_BINARY_UNITS | _DECIMAL_UNITS).items()},
}
_SECONDS_BY_UNIT = {
    "d": Fraction(86_400),
    "h": Fraction(3_600),
    "min": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
_NUMBER = r"\d+(?:_\d+)*(?:\.\d+)?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([a-zµ]*)", re.IGNORECASE)
_SIZE_EXAMPLES = "write a number and a unit, such as 64 MiB, 1.5GiB, 500MB or 4096"
_DURATION_EXAMPLES = "write a number and a unit, such as 10s, 250ms, 5min or 1h 30min"


def parse_bytes(text: str) -> int:
    """The bytes of a size such as "64 MiB", "500MB" or "4096"; the unit's case does not matter.

    Raises InvalidArgument if it is not a size, or not a whole number of bytes.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is not a byte size; {_SIZE_EXAMPLES}")
    number, unit = match.groups()
    unit_bytes = _BYTES_BY_UNIT.get(unit.lower())
    if unit_bytes is None:
        prefix = unit.upper()
        if prefix in ("K", "M", "G", "T"):
            raise InvalidArgument(
                f"{text!r} has two readings; write {number} {prefix}iB (1024) "
                f"or {number} {prefix}B (1000)"
            )
        raise InvalidArgument(f"{text!r} has an unknown unit {unit!r}; {_SIZE_EXAMPLES}")
    size = Fraction(number.replace("_", "")) * unit_bytes
    if size.denominator != 1:
        raise InvalidArgument(f"{text!r} is not a whole number of bytes; {_SIZE_EXAMPLES}")
    return int(size)


def format_bytes(size_bytes: int) -> str:
    """The shortest exact text of a size: ``parse_bytes`` gives the same number back."""
    for unit, unit_bytes in _BINARY_UNITS.items():
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes} {unit}"
    return f"{size_bytes} B"


def about_bytes(size_bytes: float) -> str:
    """A size for people, in three digits: "1.46 GiB"."""
    for unit, unit_bytes in _BINARY_UNITS.items():
        if size_bytes >= unit_bytes:
            return f"{_three_digits(size_bytes / unit_bytes)} {unit}"
    return f"{size_bytes:.0f} B"


def parse_duration(text: str) -> float:
    """The seconds of a duration such as "10s", "250ms" or "1h 30min"; a bare number is seconds.

    Raises InvalidArgument if it is not a duration.
    """
    rest = text.strip()
    if re.fullmatch(_NUMBER, rest):
        return float(Fraction(rest.replace("_", "")))
    if not rest:
        raise InvalidArgument(f"{text!r} is not a duration; {_DURATION_EXAMPLES}")
    total_s = Fraction(0)
    while rest:
        match = _QUANTITY.match(rest)
        if match is None:
            raise InvalidArgument(f"{text!r} is not a duration; {_DURATION_EXAMPLES}")
        number, unit = match.groups()
        unit_s = _SECONDS_BY_UNIT.get(unit.lower())
        if unit_s is None:
            if unit.lower() == "m":
                raise InvalidArgument(f"{text!r} has two readings; write {number}min or {number}ms")
            raise InvalidArgument(f"{text!r} has an unknown unit {unit!r}; {_DURATION_EXAMPLES}")
        total_s += Fraction(number.replace("_", "")) * unit_s
        rest = rest[match.end() :].lstrip()
    return float(total_s)


def format_duration(duration_s: float) -> str:
    """The shortest exact text of a duration in one unit: ``parse_duration`` gives it back."""
    if not duration_s:
        return "0s"
    exact_s = Decimal(repr(duration_s))  # the digits of repr, not the binary fraction behind them
    for unit in ("d", "h", "min", "s", "ms", "us"):
        count = Fraction(exact_s) / _SECONDS_BY_UNIT[unit]
        if count.denominator == 1:
            return f"{count}{unit}"
    return f"{exact_s:f}s"


def about_duration(duration_s: float) -> str:
    """A duration for people: "3.2 ms", "4.5 s", "2 h 05 min", "3 d 04 h"."""
    if duration_s < 1e-3:
        return f"{_three_digits(duration_s * 1e6)} us"
    if duration_s < 1:
        return f"{_three_digits(duration_s * 1e3)} ms"
    if duration_s < 60:
        return f"{_three_digits(duration_s)} s"
    minutes, seconds = divmod(int(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def format_ratio(ratio: float) -> str:
    """A share as a percentage with at most one decimal: "40%", "99.5%"."""
    return f"{ratio * 100:.1f}".removesuffix(".0") + "%"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
