"""How everything here is measured: pinned, interleaved, against a ceiling of the same run.

A workload times its variants (ours, and the ceilings or peers it is held against) in seconds for
the same work. ``Bench.interleave`` runs all variants once per round, so that what disturbs the
machine disturbs all of them; a line reports the median over rounds and, as its speed against each
reference, the median of the ratios within rounds. 1 = as fast as the reference, 0.5 = half as fast.
"""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv.bench.bars import Bar, Reference, Verdict
from tierkv.native.library import VARIABLE as NATIVE
from tierkv.torture.place import without_settings

F64 = npt.NDArray[np.float64]
Sample = float | F64
"""Seconds for one piece of work, or (shape [n]) of n equal pieces one after the other."""

PACKAGES = ("tierkv", "tierkv_wal", "tierkv_kernels")
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (1, 2, 3, 6, 7, 8)
"""user, nice, system, irq, softirq, steal in the first line of /proc/stat (proc(5))."""


EVERY_CPU = -1
"""In place of a CPU's number: not pinned."""


class Placement(NamedTuple):
    """Which CPU the measuring process runs on, and which one its server."""

    name: str
    client: int
    server: int


@dataclass(frozen=True)
class Unit:
    """What a line's value is given in, from seconds (or from whatever its samples are)."""

    name: str
    convert: Callable[[float], float]


MICROSECONDS = Unit("us", lambda seconds: seconds * 1e6)
MILLISECONDS = Unit("ms", lambda seconds: seconds * 1e3)
SECONDS = Unit("s", lambda seconds: seconds)


def millions_per_s(count: int) -> Unit:
    """Millions a second, when the work has ``count`` pieces."""
    return Unit("M/s", lambda seconds: count / seconds / 1e6)


BYTES_PER_BLOCK = Unit("B", lambda size: size)
"""Of samples that are bytes."""


def gigabytes_per_s(size_bytes: int) -> Unit:
    """10^9 bytes a second, when the work has this many bytes."""
    return Unit("GB/s", lambda seconds: size_bytes / seconds / 1e9)


def thousands_per_s(count: int) -> Unit:
    """Thousands a second, when the work has ``count`` pieces."""
    return Unit("k/s", lambda seconds: count / seconds / 1e3)


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number, with what it means. ``value`` is the median of the ``rounds``.

    ``foreign_cores``: how many cores other processes (and the kernel's threads) kept busy.
    """

    name: str
    unit: str
    value: float
    rounds: list[float]
    references: list[Reference]
    placement: str
    foreign_cores: float
    note: str = ""
    bars: list[Verdict] = []


@dataclass(frozen=True)
class Against:
    """A variant to hold a line against at a percentile of its own."""

    variant: str
    percentile: float

    @property
    def name(self) -> str:
        return f"{self.variant} p{self.percentile:g}"


@dataclass(frozen=True)
class Measured:
    """What ``interleave`` saw: the samples of each variant by round, and the noise."""

    samples: Mapping[str, Sequence[Sample]]
    foreign_cores: float

    def seconds(self, variant: str, percentile: float = 50) -> list[float]:
        """A percentile of the variant's samples, by round."""
        return [float(np.percentile(sample, percentile)) for sample in self.samples[variant]]

    def line(
        self,
        name: str,
        unit: Unit,
        variant: str,
        references: Sequence[str | Against],
        placement: Placement,
        *,
        percentile: float = 50,
        bars: Sequence[Bar] = (),
        note: str = "",
    ) -> Line:
        """The line about ``variant``, held against other variants at the same percentile."""
        ours = self.seconds(variant, percentile)
        against = [
            compare(one.name, unit, ours, self.seconds(one.variant, one.percentile))
            if isinstance(one, Against)
            else compare(one, unit, ours, self.seconds(one, percentile))
            for one in references
        ]
        value = unit.convert(float(np.median(ours)))
        return Line(
            name=name,
            unit=unit.name,
            value=value,
            rounds=[unit.convert(seconds) for seconds in ours],
            references=against,
            placement=placement.name,
            foreign_cores=self.foreign_cores,
            note=note,
            bars=[bar.judge(value, unit.name, against) for bar in bars],
        )


def compare(name: str, unit: Unit, ours: Sequence[float], theirs: Sequence[float]) -> Reference:
    """Seconds of ours against seconds of theirs, round by round."""
    speeds = [their / our for our, their in zip(ours, theirs, strict=True)]
    return Reference(
        name=name,
        value=unit.convert(float(np.median(theirs))),
        speed=float(np.median(speeds)),
        speed_min=min(speeds),
        speed_max=max(speeds),
    )


def each_call(call: Callable[[], object], count: int) -> F64:
    """Seconds of each of ``count`` calls, shape [count]."""
    clock = time.perf_counter_ns
    marks = np.empty(count + 1, np.int64)
    marks[0] = clock()
    for at in range(1, count + 1):
        call()
        marks[at] = clock()
    return np.diff(marks) / 1e9


def repeat(measure: Callable[[], float], count: int) -> F64:
    """Seconds that ``measure`` reports, ``count`` times in a row, shape [count]."""
    return np.array([measure() for _ in range(count)])


def once(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def child_environment() -> dict[str, str]:
    """The environment for children that run the code of this process, with nobody's settings.

    Whether the loops in C are used is no setting of a daemon: it goes for all.
    """
    environment = without_settings(os.environ)
    if NATIVE in os.environ:
        environment[NATIVE] = os.environ[NATIVE]
    # An installed daemon has its bytecode; without it every start would compile.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = dict.fromkeys(_home(package) for package in PACKAGES)
    if before := environment.get("PYTHONPATH"):
        paths[before] = None
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _home(package: str) -> str:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(package)
    return str(Path(found.origin).parents[1])


class CpuMeter:
    """Cores that neither this process nor its ``children`` kept busy since the meter was made."""

    def __init__(self, children: set[int]) -> None:
        self._children = children
        self._began = time.monotonic()
        self._busy, self._own = busy_ticks(), own_ticks(children)

    def foreign_cores(self) -> float:
        """Mean since the start; /proc counts in 10 ms, so short measurements are coarse."""
        busy = busy_ticks() - self._busy
        own = own_ticks(self._children) - self._own
        seconds = time.monotonic() - self._began
        return max(0.0, (busy - own) / CLOCK_TICKS_PER_S / seconds)


def busy_ticks(stat: str | None = None) -> int:
    """Clock ticks that all CPUs were busy since boot, from the text of /proc/stat."""
    fields = (stat or Path("/proc/stat").read_text()).split("\n", 1)[0].split()
    return sum(int(fields[at]) for at in _BUSY)


def own_ticks(children: set[int]) -> int:
    """Clock ticks of this process, of its live ``children`` and of those that have ended."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    return round(seconds * CLOCK_TICKS_PER_S) + sum(_process_ticks(pid) for pid in children)


def _process_ticks(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # Behind the command in parentheses: field 14 and 15 of proc(5) are user and system time.
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@dataclass
class Bench:
    """One run. ``folder`` is on the file system that the disk tier is measured on.

    ``quick``: small sizes, for tests. ``full``: also what takes many minutes or much memory.
    """

    folder: Path
    quick: bool = False
    full: bool = False
    rounds: int = 5
    profile: Path | None = None
    cpus: Sequence[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    children: set[int] = field(default_factory=set)

    @property
    def same_core(self) -> Placement:
        """Client and server take turns on one CPU: no wake-up across CPUs is measured."""
        return Placement("same core", self.cpus[0], self.cpus[0])

    @property
    def two_cores(self) -> Placement:
        """A CPU for the client and another one for all of the server's threads."""
        if len(self.cpus) < 2:
            return Placement("same core (there is no other)", self.cpus[0], self.cpus[0])
        return Placement("two cores", self.cpus[0], self.cpus[-1])

    @property
    def all_cores(self) -> Placement:
        """Threads of one process on every CPU."""
        return Placement("all cores", EVERY_CPU, EVERY_CPU)

    def pick(self, full: int, quick: int) -> int:
        """A size that depends on how long the run may take."""
        return quick if self.quick else full

    @contextmanager
    def pinned(self, cpu: int) -> Iterator[None]:
        """This thread, and processes it starts, on one CPU."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus if cpu == EVERY_CPU else {cpu})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def on(self, cpu: int, call: Callable[[], object]) -> float:
        """Seconds of one call on another CPU: a ceiling belongs where the server does its work."""
        with self.pinned(cpu):
            return once(call)

    def spawn(self, cpu: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """A child on one CPU, counted as ours."""
        with self.pinned(cpu):
            process = subprocess.Popen(command, **options)
        self.children.add(process.pid)
        return process

    def reap(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a child's end; returns its exit code."""
        code = process.wait()
        self.children.discard(process.pid)
        return code

    def interleave(
        self, placement: Placement, variants: Mapping[str, Callable[[], Sample]]
    ) -> Measured:
        """Run all variants round by round, on the client's CPU, each round in another order.

        A first round is not counted: it warms caches, and makes files and mappings exist.
        """
        samples: dict[str, list[Sample]] = {name: [] for name in variants}
        with self.pinned(placement.client):
            for variant in variants.values():
                variant()
            gc.collect()
            meter = CpuMeter(self.children)
            names = list(variants)
            for _ in range(self.rounds):
                for name in names:
                    samples[name].append(variants[name]())
                names.append(names.pop(0))
            return Measured(samples, meter.foreign_cores())
