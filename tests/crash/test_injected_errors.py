"""The kernel refuses a call, or lies about one, at the places where a daemon makes it.

An error of the log ends the daemon (exit code 74), one of the disk tier takes the tier out of
service, one of the index leaves the last checkpoint, and one at the start refuses the start. No
later start ever serves a wrong byte, and what was acknowledged is there unless the tier that held
it was out of service or the kernel lied.

TIERKV_CRASH_SWEEP=full takes every place, not only the first and the last of each kind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.crash.daemon import Daemon
from tests.crash.pattern import SMALL
from tests.crash.prompts import found, prompt, store
from tests.crash.sweep import FULL, Sweep, needs_strace, places, prepared_store, table
from tests.crash.sweeper import ACKS, NOT_OF_THE_STORE, Call, Job, Result
from tierkv.errors import Unavailable
from tierkv.service.daemon import EXIT_CONFIG, EXIT_FAILED, EXIT_IO, EXIT_OK

pytestmark = [needs_strace, pytest.mark.slow, pytest.mark.timeout(1800 if FULL else 300)]

WRITES = ("pwrite64", "pwritev", "pwritev2", "writev")
LACK_ROOM = (*WRITES, "write", "fallocate", "fdatasync", "rename")
"""Calls of which ENOSPC is an answer, too. Every call may fail by EIO."""

LOG_FILE = re.compile(r"/state/wal/\d+\.wal")


@dataclass(frozen=True)
class Place:
    """A call of the run without faults. ``serving``: the start is behind it."""

    index: int
    number: int
    call: Call
    serving: bool

    @property
    def kind(self) -> tuple[str, str, bool]:
        """Places of one kind fail in the same way."""
        return self.call.name, re.sub(r"\d{4,}", "N", self.call.place), self.serving


def places_to_try(
    reference: list[Call], of_each_kind: int, names: tuple[str, ...] = ()
) -> list[Place]:
    """Calls (with these names) that work on the store: all, or some of each kind, ends first."""
    first_frame = next(
        index
        for index, call in enumerate(reference)
        if call.name == "pwrite64" and LOG_FILE.fullmatch(call.place)
    )
    kinds: defaultdict[tuple[str, str, bool], list[Place]] = defaultdict(list)
    for index, number, call in places(reference):
        place = Place(index, number, call, index >= first_frame)
        if call.place in NOT_OF_THE_STORE or call.returned == -1:
            continue
        if not names or call.name in names:
            kinds[place.kind].append(place)
    chosen = []
    for kind in kinds.values():
        count = len(kind) if FULL else min(len(kind), of_each_kind)
        chosen += [kind[at * (len(kind) - 1) // max(count - 1, 1)] for at in range(count)]
    return chosen


def errors(reference: list[Call]) -> Iterator[tuple[Place, str]]:
    for place in places_to_try(reference, 2):
        yield place, "EIO"
        if place.call.name in LACK_ROOM:
            yield place, "ENOSPC"


def may_end_by(place: Place) -> tuple[int, ...]:
    """Exit codes of a daemon one of whose calls failed."""
    name, where = place.call.name, place.call.place
    if not place.serving:
        # What makes room for later, and removes what is not needed any more, need not succeed.
        return EXIT_FAILED, EXIT_CONFIG, EXIT_OK
    if LOG_FILE.fullmatch(where) and name in (*WRITES, "fdatasync"):
        return (EXIT_IO,)
    if where.startswith("/state/wal") and name != "unlink":
        # A spare that could not be made ahead is made when it is needed.
        return EXIT_IO, EXIT_OK
    return (EXIT_OK,)


def said_of(place: Place, result: Result) -> str:
    """What the log must say."""
    if result.ended == EXIT_IO:
        return "the log cannot be written, stopping at once"
    if not place.serving:
        return "level=error" if result.ended != EXIT_OK else ""
    if place.call.place.startswith("/data") and place.call.name != "openat":
        existing = place.call.name == "fdatasync" and place.call.place.endswith(".seg")
        return "may not survive power loss" if existing else "disk tier out of service"
    if place.call.place.startswith("/state/index"):
        return "checkpoint"
    return ""


def test_an_error_of_any_call_ends_in_order_and_loses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with prepared_store("kill") as store, Sweep() as sweep:
        reference = sweep.reference(Job("restart", store))
        faults = list(errors(reference))
        jobs = [
            Job(
                "restart",
                store,
                call=place.call.name,
                effect=f"error={error}",
                when=place.number,
                # While the disk tier takes nothing, blocks that nobody uses leave the other tiers.
                may_lose="blocks" if place.call.place.startswith("/data") else "",
            )
            for place, error in faults
        ]
        ends: Counter[str] = Counter()
        for (place, error), result in zip(faults, sweep.run(jobs), strict=True):
            at = f"{error} of {place.call.name} number {place.number}, of {place.call.place}"
            assert result.ended in may_end_by(place), f"{at}: {result.ended}, {result.said}"
            assert said_of(place, result) in result.said, f"{at}: {result.said}"
            assert "Traceback" not in result.said, f"{at}: {result.said}"
            assert result.problems == [], at
            failed = result.calls[place.index]
            assert (failed.name, failed.place, failed.returned) == (
                place.call.name,
                place.call.place,
                -1,
            ), f"not {at}"
            if result.ended == EXIT_IO:
                after = [call.place for call in result.calls[place.index + 1 :]]
                assert ACKS not in after, f"acknowledged after {at}"
            ends[f"exit {result.ended}"] += 1
    assert ends[f"exit {EXIT_IO}"]
    assert ends[f"exit {EXIT_FAILED}"]
    assert ends[f"exit {EXIT_OK}"]
    with capsys.disabled():
        print(f"\nerrors: {table(ends)}")


def test_a_write_that_is_only_claimed_to_be_done_is_found_out_or_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with prepared_store("kill") as store, Sweep() as sweep:
        reference = sweep.reference(Job("restart", store))
        lies = places_to_try(reference, 6, WRITES)
        jobs = [
            Job(
                "restart",
                store,
                call=place.call.name,
                effect=f"retval={place.call.returned}",
                when=place.number,
                may_lose="files",
            )
            for place in lies
        ]
        ends: Counter[str] = Counter()
        for place, result in zip(lies, sweep.run(jobs), strict=True):
            at = f"{place.call.name} number {place.number}, of {place.call.place}"
            # A page that LMDB believes to have written may be missed beyond the end of its file.
            assert result.ended in (EXIT_OK, -signal.SIGBUS), f"a lie about {at}: {result.said}"
            assert result.problems == [], f"a lie about {at}: {result.said}"
            assert result.calls[place.index].returned == place.call.returned, f"not {at}"
            ends[f"exit {result.ended}"] += 1
    with capsys.disabled():
        print(f"\nlies: {table(ends)}")


def test_a_failed_sync_on_the_sync_thread_ends_the_daemon_before_another_promise() -> None:
    with Daemon(wal__durability="power", disk__segment_bytes="1MiB") as daemon:
        fault = ("-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO:when=20")
        of_the_log = ("-P", str(daemon.state / "wal" / "0000000000000001.wal"))
        daemon.launch("strace", "-D", "-f", "-qq", "-o", os.devnull, *of_the_log, *fault)
        daemon.wait_until_serving()
        acknowledged: list[int] = []
        with contextlib.suppress(Unavailable), daemon.connect(reconnect_s=0.2) as client:
            namespace = client.namespace(SMALL)
            for number in range(200):
                store(namespace, prompt(number))
                acknowledged.append(number)
        assert daemon.ended() == EXIT_IO, daemon.last_words()
        assert "the log cannot be written, stopping at once" in daemon.last_words()
        assert acknowledged
        daemon.forget_ram()
        daemon.start()
        with daemon.connect() as client:
            assert found(client, acknowledged) == acknowledged
        assert daemon.stop() == EXIT_OK
        assert daemon.verify().findings == []
