"""kill -9 of the daemon at random moments, while workers seal, share, fork, spill and resume.

One store lives through all the kills. Whatever a worker was told is done must still be there, and
nobody may ever see a wrong byte. TIERKV_CRASH_SEED and TIERKV_CRASH_KILLS choose the run.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import pytest

from tests.crash.daemon import Daemon
from tests.crash.load import Load, check_bytes, check_found, longest
from tierkv.client.sync import Client
from tierkv.obs.status import TIERS

SEED = int(os.environ.get("TIERKV_CRASH_SEED", "20251"))
KILLS = int(os.environ.get("TIERKV_CRASH_KILLS", "0"))
CHECK_EVERY = 10
SAMPLE = 60
WORKERS = 2
WANTED = ("seals", "forks", "resumptions", "host hits", "disk hits")
"""What the workers that live at the end must have come to."""


@dataclass(frozen=True)
class Case:
    """One kind of storm. ``kills``: how many.

    ``reboot``: the RAM tiers are lost each time. ``at_write``: the daemon dies right before a
    write to its log. ``keeps_all``: whatever was acknowledged must be found again.
    """

    durability: str
    kills: int
    reboot: bool = False
    at_write: bool = False
    disk_bytes: str = "1GiB"
    keeps_all: bool = True


@dataclass
class Storm:
    """Kills, and what must hold after each."""

    case: Case
    daemon: Daemon
    load: Load
    client: Client
    chance: random.Random
    epoch: int = 0

    def kill(self) -> None:
        """Let them work for a moment, kill, start again, check."""
        self.load.await_a_worker(self.client)
        time.sleep(self.chance.uniform(0.05, 0.5))
        self.load.check_workers()
        if self.case.at_write:
            self.daemon.kill_at_write()
        else:
            self.daemon.kill()
        if self.chance.random() < 0.2:
            self.load.replace_worker(self.chance.randrange(WORKERS))
        if self.case.reboot:
            self.daemon.forget_ram()
        elif self.chance.random() < 0.2:
            self.daemon.launch()
            time.sleep(self.chance.uniform(0.2, 0.6))
            self.daemon.kill()
        self.daemon.start()
        self._check_recovery()

    def check(self, *, thorough: bool) -> None:
        """With the workers paused, look for everything that was promised."""
        self.load.pause()
        chains = longest(SEED, self.load.promises())
        assert chains, "nothing was acknowledged"
        if self.case.keeps_all:
            check_found(self.client, chains)
        if not thorough:
            chains = self.chance.sample(chains, min(len(chains), SAMPLE))
        check_bytes(self.client, chains, whole=self.case.keeps_all)
        failures = sum(
            self.daemon.metric("tierkv_checksum_failures_total", tier=tier) for tier in TIERS
        )
        assert failures == 0, "something was written wrong"
        self.load.check_workers()
        self.load.go_on()

    def _check_recovery(self) -> None:
        status = self.client.stat()
        assert status["state"] == "serving"
        assert status["epoch"] > self.epoch
        self.epoch = status["epoch"]
        assert not os.listdir(self.daemon.quarantine), self.daemon.last_words()
        copies = status["recovery"]["tiers"]
        if self.case.reboot:
            assert copies["disk"]["dropped"] == 0, copies
        elif self.case.durability == "kill":
            assert not any(tier["dropped"] for tier in copies.values()), copies


CASES = {
    "kill": Case("kill", 57),
    "at-a-log-write": Case("kill", 15, at_write=True),
    "power": Case("power", 10, reboot=True),
    # Its device tier does not outlive the daemon: only what went further down must be right.
    "none": Case("none", 10, keeps_all=False),
    "full-disk": Case("kill", 8, disk_bytes="3MiB", keeps_all=False),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_what_was_acknowledged_survives_kills_under_load(name: str) -> None:
    case = CASES[name]
    kills = KILLS or case.kills
    with Daemon(
        mortal=case.at_write,
        device__bytes="256KiB",
        host__bytes="192KiB",
        disk__bytes=case.disk_bytes,
        disk__segment_bytes="1MiB",
        wal__durability=case.durability,
        wal__segment_bytes="256KiB",
        wal__checkpoint_bytes="256KiB",
        wal__checkpoint_s="0.5s",
        server__grace_s="60s",
    ) as daemon:
        try:
            _hammer(daemon, case, kills)
        except BaseException as error:
            error.add_note(
                f"TIERKV_CRASH_SEED={SEED} TIERKV_CRASH_KILLS={kills}, {name}; the daemon's log "
                f"ends:\n{daemon.last_words()}"
            )
            raise


def _work_until_all_was_done(load: Load) -> None:
    """However few kills there were, the last one came amid work of every kind."""
    load.pause()
    while not all(load.done[wanted] for wanted in WANTED):
        load.go_on()
        load.pause()
    load.go_on()


def _hammer(daemon: Daemon, case: Case, kills: int) -> None:
    chance = random.Random(SEED)
    daemon.start()
    with (
        daemon.connect(timeout_s=30, reconnect_s=60) as client,
        Load(daemon, SEED, WORKERS) as load,
    ):
        storm = Storm(case, daemon, load, client, chance)
        for number in range(1, kills + 1):
            storm.kill()
            if number % CHECK_EVERY == 0 and number < kills:
                storm.check(thorough=False)
        _work_until_all_was_done(load)
        storm.check(thorough=True)
        load.stop()
        if case.durability == "kill":
            assert not load.done["lost"], f"a living worker lost a sequence: {load.done}"
    daemon.kill()
    assert daemon.verify().findings == []
    daemon.start()
    assert daemon.stop() == 0
    assert daemon.verify().findings == []
