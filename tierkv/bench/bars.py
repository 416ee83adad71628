"""Bars: what a line has to reach, as a share of a reference or in the line's own unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line is held against; ``value`` in the line's unit.

    ``speed``: ours in multiples of the reference, median of the rounds, and the lowest and highest.
    """

    name: str
    value: float
    speed: float
    speed_min: float
    speed_max: float


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bar, what was measured in its terms, and whether it holds."""

    bar: str
    measured: float
    holds: bool


class Bar(Protocol):
    """What is asked of a line."""

    def judge(self, value: float, unit: str, references: Sequence[Reference]) -> Verdict:
        """Whether the line with this median and these references holds it."""
        ...


@dataclass(frozen=True)
class Takes:
    """At most ``times`` the time of a reference."""

    times: float
    of: str

    def judge(self, value: float, unit: str, references: Sequence[Reference]) -> Verdict:
        measured = 1 / _speed(references, self.of)
        bar = f"<= {self.times:g} times as long as {self.of}"
        return Verdict(bar, measured, measured <= self.times)


@dataclass(frozen=True)
class Reaches:
    """At least ``share`` of the speed of a reference; above 1 it has to be faster."""

    share: float
    of: str

    def judge(self, value: float, unit: str, references: Sequence[Reference]) -> Verdict:
        measured = _speed(references, self.of)
        return Verdict(f">= {self.share:g} of {self.of}", measured, measured >= self.share)


@dataclass(frozen=True)
class AtMost:
    """In the line's unit."""

    value: float

    def judge(self, value: float, unit: str, references: Sequence[Reference]) -> Verdict:
        return Verdict(f"<= {self.value:g} {unit}", value, value <= self.value)


@dataclass(frozen=True)
class AtLeast:
    """In the line's unit."""

    value: float

    def judge(self, value: float, unit: str, references: Sequence[Reference]) -> Verdict:
        return Verdict(f">= {self.value:g} {unit}", value, value >= self.value)


@dataclass(frozen=True)
class Either:
    """One of two bars is enough: whichever is lower on this machine. Measured as the second."""

    first: Bar
    second: Bar

    def judge(self, value: float, unit: str, references: Sequence[Reference]) -> Verdict:
        first, second = (one.judge(value, unit, references) for one in (self.first, self.second))
        holds = first.holds or second.holds
        return Verdict(f"{first.bar} or {second.bar}", second.measured, holds)


def _speed(references: Sequence[Reference], name: str) -> float:
    return next(one.speed for one in references if one.name == name)
