"""The work, the same for all peers, and what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.peers.catalog import CEILING, OURS
from benchmarks.peers.document import Crash, Row
from benchmarks.peers.session import Failed, Runner, Session, Size
from tierkv.bench.harness import (
    MICROSECONDS,
    Bench,
    Line,
    Measured,
    Sample,
    Unit,
    gigabytes_per_s,
    thousands_per_s,
)

KIB, MIB = 1 << 10, 1 << 20
BATCH = 64
SIZES = (64 * KIB, 256 * KIB, MIB, 2 * MIB)
SIZES_QUICK = (64 * KIB,)
ONES_AT = (64 * KIB, MIB)
CHAIN, CHAIN_AT = 1024, 64 * KIB
CRASH_AT = MIB
CRASH_ROUNDS = 3


@dataclass
class Suite:
    """Runs the work on all peers; what one cannot do is a reason in its row, not the end."""

    bench: Bench
    runners: Sequence[Runner]
    lines: list[Line] = field(default_factory=list)
    crashes: dict[str, Crash] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, report: Callable[[str], None]) -> None:
        """All of it. ``report`` hears of each line and each failure as it comes."""
        for block_bytes in SIZES_QUICK if self.bench.quick else SIZES:
            report(f"blocks of {block_bytes // KIB} KiB")
            with self._sessions(_size(self.bench, block_bytes), report) as sessions:
                for line in self._measure(block_bytes, sessions, report):
                    self.lines.append(line)
        report("first fill, kill -9, restart")
        self._crash(report)

    @contextmanager
    def _sessions(self, size: Size, report: Callable[[str], None]) -> Iterator[dict[str, Session]]:
        """All peers at once, started; who does not start is out."""
        with ExitStack() as stack:
            sessions = {}
            for runner in self._left():
                name = runner.peer.name
                place = self.bench.two_cores
                session = stack.enter_context(Session(self.bench, place, runner, size))
                try:
                    session.start()
                except Failed as error:
                    self._fail(name, error, report)
                    continue
                self.versions[name] = session.version
                sessions[name] = session
            yield sessions

    def _measure(
        self, block_bytes: int, sessions: dict[str, Session], report: Callable[[str], None]
    ) -> Iterator[Line]:
        label = f"{block_bytes // KIB}k"
        quick = self.bench.quick
        batches = 1 if quick else max(2, min(16, 192 * MIB // (BATCH * block_bytes)))
        rate = gigabytes_per_s(BATCH * block_bytes)
        put: dict[str, Any] = {"verb": "put", "batches": batches}
        yield from self._all(f"put.{label}", rate, sessions, report, **put)
        yield from self._all(f"get.{label}", rate, sessions, report, verb="get")
        if block_bytes in ONES_AT:
            ones: dict[str, Any] = {"verb": "put_ones", "count": BATCH}
            yield from self._all(f"put1.{label}", MICROSECONDS, sessions, report, **ones)
            ones = {"verb": "get_ones", "times": 1 if quick else 4}
            at = (50, 99)
            yield from self._all(f"get1.{label}", MICROSECONDS, sessions, report, at, **ones)
        if block_bytes == CHAIN_AT:
            self._each(sessions, report, verb="put_chain", count=CHAIN // (16 if quick else 1))
            for count in (BATCH,) if quick else (BATCH, CHAIN):
                unit = thousands_per_s(count)
                asked: dict[str, Any] = {"count": count, "times": 5 if quick else 50}
                name = f"exists.{count}"
                yield from self._all(name, unit, sessions, report, verb="exists", **asked)

    def _all(
        self,
        name: str,
        unit: Unit,
        sessions: dict[str, Session],
        report: Callable[[str], None],
        percentiles: Sequence[int] = (50,),
        **asked: Any,
    ) -> Iterator[Line]:
        """One line a peer and percentile, from rounds in which the peers take turns."""

        def variant(peer: str) -> Sample:
            if peer not in sessions:
                return float("nan")
            try:
                return np.array(sessions[peer].ask(**asked)["seconds"])
            except Failed as error:
                self._fail(peer, error, report)
                sessions.pop(peer).kill()
                return float("nan")

        if not sessions:
            return
        measured = self.bench.interleave(
            self.bench.two_cores,
            {peer: lambda peer=peer: variant(peer) for peer in list(sessions)},
        )
        for percentile in percentiles:
            suffix = f".p{percentile}" if len(percentiles) > 1 else ""
            yield from self._lines(name + suffix, unit, measured, sessions, report, percentile)

    def _lines(
        self,
        name: str,
        unit: Unit,
        measured: Measured,
        sessions: Mapping[str, object],
        report: Callable[[str], None],
        percentile: int,
    ) -> Iterator[Line]:
        for peer in sessions:
            against = [other for other in (CEILING, OURS) if other in sessions and other != peer]
            line = measured.line(
                f"{peer}.{name}",
                unit,
                peer,
                against,
                self.bench.two_cores,
                percentile=percentile,
            )
            report(f"{line.name:<32} {line.value:10.3f} {line.unit}")
            yield line

    def _each(
        self, sessions: dict[str, Session], report: Callable[[str], None], **asked: Any
    ) -> None:
        for peer, session in list(sessions.items()):
            try:
                session.ask(**asked)
            except Failed as error:
                self._fail(peer, error, report)
                sessions.pop(peer).kill()

    def _crash(self, report: Callable[[str], None]) -> None:
        """Fill what is fresh, kill it after the last acknowledgement, look for what is there."""
        rounds = min(self.bench.rounds, CRASH_ROUNDS)
        bench = dataclasses.replace(self.bench, rounds=rounds)
        block_bytes = SIZES_QUICK[0] if bench.quick else CRASH_AT
        size = _size(bench, block_bytes)
        batches = 1 if bench.quick else 4
        survivors: dict[str, list[dict[str, Any]]] = {}

        def variant(runner: Runner) -> Sample:
            name = runner.peer.name
            if name in self.failures:
                return float("nan")
            try:
                with Session(bench, bench.two_cores, runner, size) as session:
                    session.start()
                    filled = session.ask("put", batches=batches)["seconds"]
                    session.kill()
                    restarted = session.start()
                    seen = session.ask("survivors", batches=batches)
            except Failed as error:
                self._fail(name, error, report)
                return float("nan")
            survivors.setdefault(name, []).append({**seen, "restarted": restarted})
            return np.array(filled)

        runners = self._left()
        if not runners:
            return
        measured = bench.interleave(
            bench.two_cores,
            {runner.peer.name: lambda runner=runner: variant(runner) for runner in runners},
        )
        well = {runner.peer.name: None for runner in self._left()}
        unit = gigabytes_per_s(BATCH * block_bytes)
        self.lines += self._lines(f"fill.{block_bytes // KIB}k", unit, measured, well, report, 50)
        for name in well:
            trials = survivors[name][1:]
            hits = [
                trial["restarted"] + trial["first_hit"]
                for trial in trials
                if trial["first_hit"] is not None
            ]
            self.crashes[name] = Crash(
                blocks=batches * BATCH,
                found=[trial["found"] for trial in trials],
                wrong=sum(trial["wrong"] for trial in trials),
                first_hit_s=float(np.median(hits)) if hits else None,
            )
            report(f"{name}: {self.crashes[name]}")

    def rows(self) -> list[Row]:
        """Whoever was asked for, with what was measured or why not."""
        rows = []
        for runner in self.runners:
            peer = runner.peer
            rows.append(
                Row(
                    name=peer.name,
                    what=peer.what,
                    survives=peer.survives,
                    makes_room=peer.makes_room,
                    server=peer.server,
                    version=self.versions.get(peer.name, ""),
                    not_run=self.failures.get(peer.name, ""),
                    crash=self.crashes.get(peer.name),
                )
            )
        return rows

    def _left(self) -> list[Runner]:
        return [runner for runner in self.runners if runner.peer.name not in self.failures]

    def _fail(self, name: str, error: Failed, report: Callable[[str], None]) -> None:
        self.failures[name] = str(error)[:300]
        report(f"{name}: not run: {error}")


def _size(bench: Bench, block_bytes: int) -> Size:
    batch_bytes = BATCH * block_bytes
    if bench.quick:
        return Size(block_bytes, BATCH, 1, 16 * batch_bytes)
    sources = max(1, 64 * MIB // batch_bytes)
    return Size(block_bytes, BATCH, sources, 640 * MIB)
