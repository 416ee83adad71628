"""Histograms against a list of what they were told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.obs.histogram import Histogram, Histograms

BOUNDS = (1.0, 2.0, 5.0)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 5.5, 9.0]), max_size=30))
def test_counts_and_quantiles(values) -> None:
    told = Histogram(BOUNDS)
    for value in values:
        told.observe(value)
    assert told.count == len(values)
    assert told.total == sum(values)
    assert told.largest == max(values, default=0.0)
    assert told.cumulative() == [
        *((str(bound), sum(value <= bound for value in values)) for bound in BOUNDS),
        ("+Inf", len(values)),
    ]
    for share in (0.5, 0.99, 1.0):
        bound = told.quantile(share)
        assert sum(value <= bound for value in values) >= share * len(values)


def test_one_histogram_for_each_label() -> None:
    told = Histograms(BOUNDS)
    told["seal"].observe(3.0)
    told["seal"].observe(4.0)
    told["device", "host"].observe(1.0)
    assert {label: one.count for label, one in told.items()} == {"seal": 2, ("device", "host"): 1}
