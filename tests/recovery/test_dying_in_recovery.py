"""The daemon dies at each step of its recovery; the next one comes to the same state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recovery_harness import (
    SIZE,
    Countdown,
    Daemon,
    Killed,
    Machine,
    StoppingStorage,
    kept,
    picture,
)

from tierkv.core.invariants import check_invariants
from tierkv.service import machine as machine_module
from tierkv.service.store import StateDirectory
from tierkv.tiers.arena import Arena
from tierkv.tiers.index import Index

PROMPTS = [[base + t for t in range(blocks * SIZE)] for base, blocks in ((0, 3), (50, 2), (90, 1))]
TOKEN = b"the worker's own"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Countdown:
    """Every change that recovery makes on disk is a step at which it may die."""
    countdown = Countdown()
    monkeypatch.setattr(machine_module, "RealStorage", lambda: StoppingStorage(countdown))
    for owner, name in (
        (Index, "commit"),
        (Arena, "open"),
        (StateDirectory, "set_aside"),
        (StateDirectory, "write_format"),
    ):
        monkeypatch.setattr(owner, name, _stepping(owner, name, countdown))
    return countdown


def _stepping(owner: type, name: str, countdown: Countdown) -> Any:
    bound = isinstance(owner.__dict__[name], classmethod)
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        countdown.step(f"before {name}")
        result = original(*args, **kwargs)
        countdown.step(f"after {name}")
        return result

    return staticmethod(call) if bound else call


def _work(machine: Machine, durability: str = "kill") -> Daemon:
    """A store with a checkpoint, records behind it, and blocks in every tier."""
    daemon = machine.start(device=8, host=2, disk=6, durability=durability)
    lease = daemon.hello(TOKEN)
    daemon.store(lease, 1, PROMPTS[0])
    daemon.write_behind()
    daemon.planner.suspend(lease, 1)
    daemon.checkpoint()
    daemon.store(lease, 2, PROMPTS[1])
    daemon.write()
    daemon.writer.sync()
    dead = daemon.hello(b"of somebody dead", pid=2**22 - 1)
    daemon.store(dead, 1, PROMPTS[2])
    daemon.write()
    daemon.store(lease, 3, [t + 7 for t in PROMPTS[1]])
    return daemon


def _sound(machine: Machine) -> None:
    machine.crash()


def _torn(machine: Machine) -> None:
    daemon = machine.daemon
    assert daemon is not None
    frame = bytes(daemon.writer._frame)
    at = daemon.writer._segment.offset_of(daemon.writer.written_lsn + 1)
    segment = _last_segment(machine)
    machine.crash()
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(b"TKF1" + frame[4 : len(frame) // 2])


def _rotten(machine: Machine) -> None:
    """A synced frame, some way behind the checkpoint, loses a bit."""
    daemon = machine.daemon
    assert daemon is not None
    first = daemon.writer._segment.first_lsn
    segment = _last_segment(machine)
    at = daemon.writer._segment.offset_of(max(first, daemon.writer.durable_lsn - 3))
    machine.crash()
    with segment.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def _truncated_index(machine: Machine) -> None:
    """The index is damaged: it is made anew from the slots."""
    index = machine.folder / "state" / "index" / "data.mdb"
    machine.crash()
    index.write_bytes(index.read_bytes()[:-4096] if index.stat().st_size > 16384 else b"\1" * 8192)


def _last_segment(machine: Machine) -> Path:
    return sorted((machine.folder / "state" / "wal").glob("*.wal"))[-1]


@pytest.mark.parametrize("damage", [_sound, _torn, _rotten, _truncated_index])
def test_dying_anywhere_in_recovery_changes_nothing(
    folder: Path, steps: Countdown, damage: Callable[[Machine], None]
) -> None:
    machine = Machine(folder / "reference")
    _work(machine)
    damage(machine)
    steps.steps = 0
    daemon = machine.start()
    expected, count, epoch = kept(picture(daemon.state)), steps.steps, daemon.state.epoch
    end = daemon.report.wal_end
    machine.crash()
    assert {_sound: "clean", _torn: "torn", _rotten: "corrupt"}.get(damage, "set aside") == end
    assert count > 10
    for at in range(1, count + 1):
        machine = Machine(folder / str(at))
        _work(machine)
        damage(machine)
        steps.left = at
        with pytest.raises(Killed):
            machine.start()
        steps.left = 0
        daemon = machine.start()
        check_invariants(daemon.state)
        assert kept(picture(daemon.state)) == expected, steps.names[-1]
        assert daemon.state.epoch >= epoch
        _work_goes_on(daemon)
        machine.crash()


def _work_goes_on(daemon: Daemon) -> None:
    lease = daemon.hello()
    daemon.store(lease, 9, PROMPTS[0])
    daemon.write()
    assert daemon.cached(PROMPTS[0]) == 3


@pytest.mark.parametrize("at", range(1, 9))
def test_dying_again_and_again(folder: Path, steps: Countdown, at: int) -> None:
    """Each attempt gets a little further; epochs grow all the same, and nothing is lost."""
    machine = Machine(folder)
    _work(machine)
    before = machine.daemon
    assert before is not None
    assert before.written is not None
    epoch = before.state.epoch
    machine.crash()
    for attempt in range(4):
        steps.left = at + 5 * attempt
        with pytest.raises(Killed):
            machine.start()
    steps.left = 0
    daemon = machine.start()
    assert daemon.state.epoch > epoch
    assert daemon.cached(PROMPTS[0]) == 3
    assert daemon.cached(PROMPTS[1]) == 2
    assert daemon.report.wal_end == "clean"
