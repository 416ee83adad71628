"""What a metric is: name, labels, help, why it exists, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from tierkv.core.counters import Counters
from tierkv.obs.status import StatusDocument

Sample = tuple[tuple[str, ...], float]
Read = Callable[[Counters, StatusDocument], Iterable[Sample]]


class Type(Enum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Declared(NamedTuple):
    """One metric. ``read`` yields (label values, value) at scrape time.

    A histogram has ``buckets`` (upper bounds) instead, and is observed.
    """

    name: str
    type: Type
    help: str
    why: str
    labels: tuple[str, ...] = ()
    read: Read | None = None
    buckets: tuple[float, ...] = ()


def value(read: Callable[[Counters, StatusDocument], float]) -> Read:
    return lambda counters, status: [((), read(counters, status))]


def counted(read: Callable[[Counters], Mapping[Any, int]]) -> Read:
    """Counts by label value, or by tuple of label values."""

    def samples(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
        for key, count in read(counters).items():
            yield (key if isinstance(key, tuple) else (key,)), count

    return samples


def decades(first: int, last: int) -> tuple[float, ...]:
    """1, 2, 5 times each power of ten from 10**first up to 10**last, in seconds."""
    steps = [float(f"{step}e{power}") for power in range(first, last) for step in (1, 2, 5)]
    return (*steps, float(f"1e{last}"))
