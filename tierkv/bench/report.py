"""The result of a run: for people a line each, for programs one JSON document."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

import tierkv
from tierkv.bench.bars import Verdict
from tierkv.bench.ceilings import compiler
from tierkv.bench.harness import Bench, Line
from tierkv.native.loops import loops

VERSION = 2


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the numbers depend on, as far as it can be told."""

    cpu: str
    cpus: int
    cpus_share_a_core: bool
    system: str
    python: str
    numpy: str
    event_loop: str
    loops: str
    compiler: str
    file_system: str


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run. ``rounds``: how many each value is the median of."""

    version: int
    tierkv: str
    quick: bool
    rounds: int
    machine: Machine
    lines: list[Line]


def describe_machine(folder: Path) -> Machine:
    """This machine; ``folder`` is where the disk tier was measured."""
    release = ".".join(platform.release().split(".")[:2])
    return Machine(
        cpu=_cpu_model(Path("/proc/cpuinfo").read_text()),
        cpus=len(os.sched_getaffinity(0)),
        cpus_share_a_core=_siblings(),
        system=f"{platform.system()} {release}",
        python=platform.python_version(),
        numpy=np.__version__,
        event_loop="uvloop" if find_spec("uvloop") else "asyncio",
        loops="Python" if loops().missing else "native",
        compiler=compiler() or "none: Python stands in for C",
        file_system=file_system(folder, Path("/proc/mounts").read_text()),
    )


def document(machine: Machine, bench: Bench) -> Document:
    """The document of a run that begins; its lines are still to come."""
    return Document(VERSION, tierkv.__version__, bench.quick, bench.rounds, machine, [])


def to_json(found: Document) -> bytes:
    """The document, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def from_json(content: bytes) -> Document:
    """Read it back. Raises msgspec.ValidationError if it is no such document."""
    return msgspec.json.decode(content, type=Document)


def render(line: Line) -> str:
    """One line for people."""
    against = "  ".join(
        f"{speed_text(one.speed)}x {one.name} ({number(one.value)})" for one in line.references
    )
    verdicts = "".join(f"  {verdict_text(one)}" for one in line.bars)
    where = f"[{line.placement}, foreign {line.foreign_cores:.2f}]"
    note = f" ({line.note})" if line.note else ""
    return (
        f"{line.name:<28}{number(line.value):>8} {line.unit:<5} {against}  {where}{note}{verdicts}"
    )


def verdict_text(one: Verdict) -> str:
    """Whether a bar holds, what was measured, and the bar."""
    return f"{'ok' if one.holds else 'below'}: {number(one.measured)} ({one.bar})"


def number(value: float) -> str:
    """Three digits that matter."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def speed_text(speed: float) -> str:
    """A ratio, with two digits that matter."""
    return f"{speed:.2g}" if speed < 0.1 else f"{speed:.2f}" if speed < 10 else f"{speed:.0f}"


def file_system(folder: Path, mounts: str) -> str:
    """Type of the file system that holds the folder, from the text of /proc/mounts."""
    best, found = -1, "unknown"
    resolved = folder.resolve()
    for row in mounts.splitlines():
        _, point, kind, *_ = row.split()
        mounted = Path(point.replace("\\040", " "))
        depth = len(mounted.parts)
        if depth > best and resolved.is_relative_to(mounted):
            best, found = depth, kind
    return found


def _cpu_model(cpuinfo: str) -> str:
    for row in cpuinfo.splitlines():
        key, _, value = row.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _siblings() -> bool:
    """Whether the first and the last CPU are two threads of one core."""
    cpus = sorted(os.sched_getaffinity(0))
    path = Path(f"/sys/devices/system/cpu/cpu{cpus[0]}/topology/core_cpus_list")
    if len(cpus) < 2 or not path.exists():
        return False
    return str(cpus[-1]) in path.read_text().strip().replace("-", ",").split(",")


def main_line(found: Document) -> str:
    """What ran, before the lines."""
    machine = found.machine
    return (
        f"tierkv {found.tierkv}, {machine.cpus} CPUs ({machine.cpu}), {machine.system}, "
        f"{sys.implementation.name} {machine.python}, {machine.event_loop}, {machine.loops} loops, "
        f"{machine.file_system}; median of {found.rounds} rounds"
    )
