"""Bars: what holds, what does not, and what is said of it."""

from __future__ import annotations

import pytest

from tierkv.bench.bars import AtLeast, AtMost, Bar, Either, Reaches, Reference, Takes, Verdict

COPY = Reference("copy", value=10.0, speed=0.8, speed_min=0.7, speed_max=0.9)


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        (Reaches(0.8, "copy"), Verdict(">= 0.8 of copy", 0.8, True)),
        (Reaches(0.81, "copy"), Verdict(">= 0.81 of copy", 0.8, False)),
        (Takes(1.25, "copy"), Verdict("<= 1.25 times as long as copy", 1.25, True)),
        (Takes(1.2, "copy"), Verdict("<= 1.2 times as long as copy", 1.25, False)),
        (AtMost(8), Verdict("<= 8 GB/s", 8.0, True)),
        (AtMost(7.9), Verdict("<= 7.9 GB/s", 8.0, False)),
        (AtLeast(8), Verdict(">= 8 GB/s", 8.0, True)),
        (AtLeast(8.1), Verdict(">= 8.1 GB/s", 8.0, False)),
        (
            Either(AtLeast(9), Reaches(0.9, "copy")),
            Verdict(">= 9 GB/s or >= 0.9 of copy", 0.8, False),
        ),
        (
            Either(AtLeast(7), Reaches(0.9, "copy")),
            Verdict(">= 7 GB/s or >= 0.9 of copy", 0.8, True),
        ),
        (
            Either(AtLeast(9), Reaches(0.7, "copy")),
            Verdict(">= 9 GB/s or >= 0.7 of copy", 0.8, True),
        ),
    ],
)
def test_a_bar_is_judged_by_the_median(bar: Bar, verdict: Verdict) -> None:
    assert bar.judge(8.0, "GB/s", [COPY]) == verdict


def test_a_bar_on_a_reference_that_the_line_lacks_is_a_mistake() -> None:
    with pytest.raises(StopIteration):
        Reaches(1, "another").judge(8.0, "GB/s", [COPY])
