"""What a page of metrics says of the loop's turns."""

from __future__ import annotations

import math

import pytest

from tierkv.bench.turns import buckets, quantile

PAGE = """# TYPE x_seconds histogram
x_seconds_bucket{le="0.001"} 989.0
x_seconds_bucket{le="0.002"} 999.0
x_seconds_bucket{le="+Inf"} 1000.0
x_seconds_count 1000.0
xx_seconds_bucket{le="0.001"} 5.0
"""


def test_the_counts_of_a_histogram() -> None:
    assert buckets(PAGE, "x_seconds") == {0.001: 989.0, 0.002: 999.0, math.inf: 1000.0}
    assert buckets(PAGE, "y_seconds") == {}


@pytest.mark.parametrize(
    ("share", "bound"), [(0.5, 0.001), (0.99, 0.002), (0.999, 0.002), (0.9991, math.inf)]
)
def test_a_quantile_is_the_bound_that_holds_it(share: float, bound: float) -> None:
    assert quantile(buckets(PAGE, "x_seconds"), share) == bound


def test_of_nothing_there_is_no_quantile() -> None:
    with pytest.raises(ValueError, match="nothing"):
        quantile({}, 0.5)
