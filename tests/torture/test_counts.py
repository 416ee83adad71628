"""Every count of a torture is zero for a sound daemon, and not for a broken one or a bad disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.daemon import freeze, python_environment
from tierkv.tiers.disk import disk_slot_bytes
from tierkv.torture import daemon as daemons
from tierkv.torture import run
from tierkv.torture.daemon import Broken, Daemon
from tierkv.torture.pattern import BRANCHES, SPECS, prompt
from tierkv.torture.promises import blocks_of
from tierkv.torture.report import Report
from tierkv.torture.worker import DEPTH_MAX
from tierkv.units import parse_bytes

SEED = 4711
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def torture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Runs a torture of some kills to its end, with a check after each."""
    monkeypatch.setattr(run, "CHECK_EVERY", 1)

    def go(
        kills: int,
        *,
        before_start: Callable[[Daemon], None] = lambda _daemon: None,
        module: str = "tierkv",
        durability: str = "kill",
    ) -> Report:
        one = run.Torture(
            run.Plan(SEED, durability, kills=kills),
            tmp_path,
            before_start=before_start,
            module=module,
            environment=python_environment(),
        )
        one.run()
        assert one.report.survived + one.report.lost + one.report.wrong >= one.report.acknowledged
        return one.report

    return go


def from_start(number: int, tamper: Callable[[Daemon], None]) -> Callable[[Daemon], None]:
    """Tampers before every start from this one on; the first is number 1."""
    starts = 0

    def before_start(daemon: Daemon) -> None:
        nonlocal starts
        starts += 1
        if starts >= number:
            tamper(daemon)

    return before_start


def flip_payloads(daemon: Daemon) -> None:
    """One wrong bit in every page on disk that is no slot's header."""
    for path in daemon.data.rglob("*.seg"):
        content = bytearray(path.read_bytes())
        for page in range(0, len(content), 4096):
            if content[page : page + 4] != b"TKVB":
                content[page + 100] ^= 1
        path.write_bytes(content)


def rot(daemon: Daemon) -> None:
    """Payloads on disk are damaged, and no copies in memory can be served instead."""
    flip_payloads(daemon)
    daemon.forget_ram()


@pytest.mark.parametrize("durability", ["kill", "power"])
def test_a_sound_daemon_keeps_all_it_acknowledged(
    torture: Callable[..., Report], durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "KILLS_PER_STORE", 2)
    report = torture(6, durability=durability)
    assert report.ok, report.failure
    assert report.acknowledged > 0
    assert report.survived == report.acknowledged
    assert (report.lost, report.wrong, report.resurrected) == (0, 0, 0)
    assert report.checksum_failures == 0
    assert report.stores >= 2
    assert 0 < report.recoveries <= report.kills
    assert all(seconds > 0 for seconds in report.recovery_s)


def test_durability_none_may_lose_but_serves_nothing_wrong(
    torture: Callable[..., Report],
) -> None:
    report = torture(3, durability="none")
    assert report.ok, report.failure
    assert (report.wrong, report.resurrected) == (0, 0)
    assert report.survived + report.lost == report.acknowledged > 0


def test_payloads_that_rot_on_disk_are_lost_and_never_wrong(
    torture: Callable[..., Report],
) -> None:
    report = torture(20, before_start=from_start(4, rot))
    assert report.lost > 0, report.failure
    assert (report.wrong, report.resurrected) == (0, 0)
    assert report.checksum_failures > 0
    assert not report.ok
    assert f"{report.lost} lost" in report.failure


def test_rot_that_no_check_finds_is_wrong(torture: Callable[..., Report]) -> None:
    report = torture(20, before_start=from_start(4, rot), module="tests.torture.blind")
    assert report.wrong > 0
    assert not report.ok
    assert "wrong" in report.failure


def test_a_wiped_store_is_lost(torture: Callable[..., Report]) -> None:
    report = torture(20, before_start=from_start(4, lambda daemon: shutil.rmtree(daemon.state)))
    assert report.lost > 0
    assert (report.wrong, report.resurrected) == (0, 0)
    assert not report.ok


def test_a_deleted_store_that_comes_back_is_resurrected(
    torture: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "KILLS_PER_STORE", 1)
    kept = tmp_path / "kept"

    def bring_back(daemon: Daemon) -> None:
        if daemon.state.exists():
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(daemon.state, kept)
        elif kept.exists():
            shutil.copytree(kept, daemon.state)

    report = torture(20, before_start=bring_back)
    assert report.resurrected > 0
    assert not report.ok
    assert "resurrected" in report.failure


def test_sequences_of_dead_workers_that_come_back_are_resurrected(
    torture: Callable[..., Report],
) -> None:
    report = torture(40, module="tests.torture.hopeful")
    assert report.ended_sequences > 0
    assert report.resurrected >= report.ended_sequences
    assert not report.ok


def test_a_daemon_that_does_not_start_is_a_failure(torture: Callable[..., Report]) -> None:
    report = torture(1, module="tests.torture.absent")
    assert not report.ok
    assert "the daemon ended" in report.failure
    assert "tests.torture.absent" in report.failure, "its last words are missing"


def test_a_daemon_that_hangs_is_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(tmp_path, run.SETTINGS, environment=python_environment()) as daemon:
        daemon.start()
        monkeypatch.setattr(daemons, "START_S", 0.1)
        freeze(daemon.pid)
        with pytest.raises(Broken, match="does not end"):
            daemon.stop()


def test_the_disk_tier_holds_every_block_that_a_store_can_see() -> None:
    depths = [[]]
    for _ in range(DEPTH_MAX):
        depths = [[*way, choice] for way in depths for choice in range(BRANCHES)]
    total = 0
    for spec in SPECS:
        blocks = {block for way in depths for block in blocks_of((spec.model, prompt(SEED, way)))}
        total += len(blocks) * disk_slot_bytes(spec.block_bytes, spec.block_tokens)
    assert 4 * total < parse_bytes(run.SETTINGS["disk.bytes"])
