"""What a run leaves for programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.engines.engine import Answer
from tierkv.bench.report import Machine

VERSION = 2
PLAIN, EMPTY, ENGINE_KILLED, BOTH_KILLED = "plain", "empty", "engine killed", "both killed"
"""States: no store; one that nothing hits; another engine on the same store; both started anew."""


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt, asked an engine without a connector and one with a store. Seconds to the first
    token, wall and CPU; ``cached``: prompt tokens that came from the store; ``same``: whether the
    answers are the same, token by token."""

    plain_s: float
    plain_cpu_s: float
    own_s: float
    own_cpu_s: float
    cached: int
    same: bool

    @classmethod
    def of(cls, plain: Answer, own: Answer) -> Pair:
        return cls(
            plain_s=plain.ttft_s,
            plain_cpu_s=plain.ttft_cpu_s,
            own_s=own.ttft_s,
            own_cpu_s=own.ttft_cpu_s,
            cached=own.cached,
            same=plain.tokens == own.tokens,
        )


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts of one length in one state of the store."""

    store: str
    state: str
    tokens: int
    pairs: list[Pair]

    def median(self, value: Callable[[Pair], float]) -> float:
        """Of what ``value`` finds in each pair."""
        return median(value(pair) for pair in self.pairs)

    @property
    def gain(self) -> float:
        """How many times sooner the first token is there, by the wall clock."""
        return self.median(lambda pair: pair.plain_s / pair.own_s)

    @property
    def cpu_gain(self) -> float:
        """The same in CPU time of the engine."""
        return self.median(lambda pair: pair.plain_cpu_s / pair.own_cpu_s)


class Crash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The store is killed with -9 under a stream of requests that hit, and started again.

    Seconds that requests took, from question to last token. ``hit``: of those that hit, before;
    ``gone``: of all that ran between the kill and the moment the store served again; ``plain``: of
    an engine without a store, while the same was done to the store beside it. ``returns_s``: from
    when the store served again until the first request begins that hits; None: none did in a
    minute. ``stuck``: how long one answer was waited for until the engine was given up; 0: it never
    was. ``same``: whether all answers are right.
    """

    store: str
    tokens: int
    plain_s: list[float]
    hit_s: list[float]
    gone_s: list[float]
    away_s: float
    returns_s: float | None
    stuck_s: float
    same: bool

    @property
    def worst_s(self) -> float:
        """How long the slowest request took, if it had an answer at all."""
        return max([*self.gone_s, self.stuck_s])

    @property
    def stall_s(self) -> float:
        """How much longer the slowest request took than the slowest on the engine without one."""
        return self.worst_s - max(self.plain_s)


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of vLLM's own client against vLLM's own server."""

    store: str
    state: str
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    duration_s: float
    completed: int
    failed: int


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run."""

    version: int
    tierkv: str
    quick: bool
    machine: Machine
    engine: str
    stores: dict[str, str]
    rows: list[Row] = []
    crashes: list[Crash] = []
    served: list[Served] = []


def save(found: Document, path: Path) -> None:
    """Write it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def load(path: Path) -> Document:
    """Read it back. Raises msgspec.ValidationError if it is no such document."""
    return msgspec.json.decode(path.read_bytes(), type=Document)
