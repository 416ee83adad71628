"""The arithmetic behind every line: medians, ratios, noise, placement."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tierkv_wal

import tierkv
from tierkv.bench import harness
from tierkv.bench.bars import AtMost, Takes
from tierkv.bench.echo import Echo, frame
from tierkv.bench.harness import (
    CLOCK_TICKS_PER_S,
    MICROSECONDS,
    SECONDS,
    Against,
    Bench,
    CpuMeter,
    Measured,
    busy_ticks,
    child_environment,
    compare,
    each_call,
    gigabytes_per_s,
    own_ticks,
    thousands_per_s,
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = os.sched_getaffinity(0)
    yield Bench(tmp_path, quick=True, rounds=3)
    assert os.sched_getaffinity(0) == before, "a measurement left this process pinned"


def test_speed_is_the_median_of_the_ratios_within_rounds() -> None:
    # The machine was ten times slower in the second round: for both, so it does not matter.
    found = compare("peer", SECONDS, [2.0, 20.0, 2.0], [1.0, 10.0, 4.0])

    assert found.speed == 0.5
    assert (found.speed_min, found.speed_max) == (0.5, 2.0)
    assert found.value == 4.0


def test_a_line_holds_median_rounds_and_references_in_one_unit() -> None:
    measured = Measured({"ours": [1e-6, 3e-6, 2e-6], "ceiling": [1e-6, 1e-6, 1e-6]}, 0.25)

    line = measured.line("x", MICROSECONDS, "ours", ["ceiling"], Bench(Path()).same_core)

    assert line.value == pytest.approx(2.0)
    assert line.rounds == pytest.approx([1.0, 3.0, 2.0])
    assert line.references[0].value == pytest.approx(1.0)
    assert line.references[0].speed == pytest.approx(0.5)
    assert line.foreign_cores == 0.25


def test_percentiles_are_taken_within_a_round() -> None:
    calls = np.arange(1, 101) / 1e6
    measured = Measured({"ours": [calls, calls * 2]}, 0.0)

    assert measured.seconds("ours", 99) == pytest.approx([99.01e-6, 198.02e-6])


def test_a_reference_may_have_a_percentile_of_its_own() -> None:
    calls = np.arange(1, 101) / 1e6
    measured = Measured({"ours": [calls], "ceiling": [calls]}, 0.0)

    line = measured.line(
        "x",
        MICROSECONDS,
        "ours",
        [Against("ceiling", 50)],
        Bench(Path()).same_core,
        percentile=99,
        bars=[Takes(2, "ceiling p50"), AtMost(99)],
    )

    assert line.references[0].value == pytest.approx(50.5)
    assert [one.holds for one in line.bars] == [True, False]
    assert line.bars[0].measured == pytest.approx(99.01 / 50.5)


def test_children_run_this_code_with_nobodys_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_DEVICE__BYTES", "1 MiB")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys, tierkv, tierkv_wal; print(tierkv.__file__, tierkv_wal.__file__)"
    environment = child_environment()
    command = [sys.executable, "-P", "-c", code]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.split() == [tierkv.__file__, tierkv_wal.__file__]
    assert "TIERKV_DEVICE__BYTES" not in environment
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_rates_turn_seconds_round() -> None:
    assert gigabytes_per_s(3_000_000_000).convert(2.0) == 1.5
    assert thousands_per_s(4000).convert(2.0) == 2.0


def test_variants_take_turns_and_the_first_round_is_not_counted(bench: Bench) -> None:
    calls: list[str] = []

    def variant(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    measured = bench.interleave(
        bench.same_core, {"a": lambda: variant("a", 1.0), "b": lambda: variant("b", 2.0)}
    )

    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert measured.samples == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_a_measurement_runs_on_the_clients_cpu(bench: Bench) -> None:
    seen: list[set[int]] = []

    def look() -> float:
        seen.append(os.sched_getaffinity(0))
        return 1.0

    bench.interleave(bench.two_cores, {"look": look})

    assert seen == [{bench.two_cores.client}] * 4


def test_a_child_runs_on_the_cpu_it_was_given(bench: Bench) -> None:
    cpu = bench.cpus[-1]
    code = f"import os, sys; sys.exit(os.sched_getaffinity(0) != {{{cpu}}})"

    assert bench.reap(bench.spawn(cpu, [sys.executable, "-c", code])) == 0
    assert not bench.children


def test_one_cpu_alone_is_said_to_be_shared() -> None:
    assert Bench(Path(), cpus=[3]).two_cores == ("same core (there is no other)", 3, 3)
    assert Bench(Path(), cpus=[3, 5]).two_cores == ("two cores", 3, 5)


def test_each_call_is_timed_by_itself() -> None:
    waits = iter([0.0, 0.02, 0.0])

    spent = each_call(lambda: time.sleep(next(waits)), 3)

    assert spent.shape == (3,)
    assert int(np.argmax(spent)) == 1
    assert spent[1] >= 0.02


def test_busy_ticks_leave_out_idle_and_waiting_for_disks() -> None:
    #                 user nice system   idle  iowait irq softirq steal guest guest_nice
    stat = "cpu 100 20 30 99999 88888 4 5 6 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"

    assert busy_ticks(stat) == 165


def test_work_of_this_process_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = {"busy": 1000, "own": 500}
    clock = {"now": 0.0}
    monkeypatch.setattr(harness, "busy_ticks", lambda: ticks["busy"])
    monkeypatch.setattr(harness, "own_ticks", lambda _children: ticks["own"])
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    meter = CpuMeter(set())

    clock["now"] = 2.0
    ticks["busy"] += 3 * CLOCK_TICKS_PER_S
    ticks["own"] += 2 * CLOCK_TICKS_PER_S

    assert meter.foreign_cores() == 0.5


def test_a_childs_work_is_ours_while_it_lives_and_afterwards(bench: Bench) -> None:
    code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = own_ticks(bench.children)
    child = bench.spawn(bench.cpus[0], [sys.executable, "-c", code], stdin=-1, stdout=-1)
    assert child.stdin is not None
    assert child.stdout is not None

    child.stdout.readline()
    alive = own_ticks(bench.children)
    child.stdin.close()
    child.stdout.close()
    bench.reap(child)
    ended = own_ticks(bench.children)

    assert alive - before >= 0.25 * CLOCK_TICKS_PER_S
    assert ended >= alive - 2, "its time must not vanish when it ends"


@pytest.mark.parametrize("has_compiler", [True, False])
def test_echo_answers_this_process_and_its_own_client(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    if not has_compiler:
        monkeypatch.setattr("tierkv.bench.ceilings.compiler", lambda: None)
    with Echo(bench, bench.same_core, reply_bytes=20_000) as echo:
        echo.exchange(frame(100_000))
        spent = echo.ping(100_000, 5)
        echo.exchange(frame(16))

    assert spent.shape == (5,)
    assert (spent > 0).all()
    assert echo.name == ("C echo" if has_compiler else "Python echo")
    assert not bench.children
