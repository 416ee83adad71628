"""The torture itself: kills a daemon under load, again and again, and looks for what it owes.

A store lives through KILLS_PER_STORE kills. Then it is checked whole and deleted, but for the RAM
tiers' files, and the next one begins with other prompts: nothing of the last may be found in it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tierkv.client.sync import Client
from tierkv.core.ids import Tier
from tierkv.errors import TierkvError
from tierkv.torture.daemon import Broken, Daemon
from tierkv.torture.load import Load, SawWrongBytes
from tierkv.torture.promises import Chain, longest, look_up, read
from tierkv.torture.report import Report

KILLS_PER_STORE = 50
CHECK_EVERY = 5
"""Kills between two checks."""
SAMPLE = 60
"""Chains whose bytes a check reads; the last check of a store reads all."""
WAIT_S = 60.0
"""Longest wait for a worker to come back; only a broken one comes to it."""

SETTINGS = {
    # Small RAM tiers, so that most blocks must go down and come up again. The disk tier takes
    # several times all prompts that a store can come to see: nothing is ever evicted from it.
    "device.bytes": "256KiB",
    "host.bytes": "192KiB",
    "disk.bytes": "1GiB",
    "disk.segment_bytes": "1MiB",
    "wal.segment_bytes": "256KiB",
    "wal.checkpoint_bytes": "256KiB",
    "wal.checkpoint_s": "0.5s",
    "server.grace_s": "60s",
}


@dataclass(frozen=True)
class Plan:
    """What to do. It ends after ``seconds`` or ``kills``, whichever comes first."""

    seed: int
    durability: str = "kill"
    workers: int = 2
    seconds: float = float("inf")
    kills: int | float = float("inf")


class Torture:
    """One run, in the empty directory ``folder``; ``report`` is right at any moment.

    ``progress`` is called with a line now and then. ``is_stopped`` is asked between two kills;
    ``pulse`` is called often, where it may raise KeyboardInterrupt. (A signal's handler may not:
    in the midst of ``subprocess`` that leaves a lock behind, and cleaning up waits for it.)
    ``before_start`` is called whenever the daemon is down and about to be started. ``module`` is
    run as the daemon, in ``environment``.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        progress: Callable[[str], None] = lambda _line: None,
        is_stopped: Callable[[], bool] = lambda: False,
        pulse: Callable[[], None] = lambda: None,
        before_start: Callable[[Daemon], None] = lambda _daemon: None,
        module: str = "tierkv",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.report = Report(plan.seed, plan.durability)
        self._plan = plan
        self._progress = progress
        self._is_stopped = is_stopped
        self._pulse = pulse
        self._before_start = before_start
        self._chance = random.Random(plan.seed)
        self._ends_s = time.monotonic() + plan.seconds
        settings = SETTINGS | {"wal.durability": plan.durability}
        self._daemon = Daemon(folder, settings, module=module, environment=environment)
        self._deleted: list[Chain] = []

    def run(self) -> None:
        """Torture until the plan is fulfilled or a promise was broken; fills ``report``.

        After a failure the RAM tiers are kept in ``folder``, too. Raises OSError.
        """
        with self._daemon, self._failures():
            for number in count():
                self._one_store(self._plan.seed * 10_000 + number)
                if self._is_over():
                    return

    def _one_store(self, tree: int) -> None:
        daemon, report = self._daemon, self.report
        report.stores += 1
        self._start()
        with (
            daemon.connect(timeout_s=30, reconnect_s=60) as client,
            Load(daemon, tree, self._plan.workers) as load,
        ):
            for number in range(1, KILLS_PER_STORE + 1):
                self._kill_and_recover(client, load)
                last = number == KILLS_PER_STORE or self._is_over()
                if last or number % CHECK_EVERY == 0:
                    self._check(client, load, tree, thorough=last)
                if last:
                    break
            load.stop()
            if self._plan.durability == "kill" and load.done["lost"]:
                raise Broken(f"living workers lost sequences, {load.done['lost']} times")
            self._deleted = longest(tree, load.promises())
        daemon.kill()
        report.kills += 1
        findings = daemon.verify().findings
        if findings:
            raise Broken(f"the store is damaged: {findings[0]} ({len(findings)} findings)")
        shutil.rmtree(daemon.state)

    def _kill_and_recover(self, client: Client, load: Load) -> None:
        """Let them work for a moment, kill, start again."""
        daemon, chance = self._daemon, self._chance
        self._await_a_worker(client, load)
        self._pulse()
        time.sleep(chance.uniform(0.05, 0.5))
        load.check_workers()
        daemon.kill()
        self.report.kills += 1
        if chance.random() < 0.2:
            load.replace_worker(chance.randrange(self._plan.workers))
        if self._plan.durability == "power":
            daemon.forget_ram()
        if chance.random() < 0.2:
            # Somewhere in its recovery, or right behind it.
            daemon.launch()
            time.sleep(chance.uniform(0.2, 0.6))
            daemon.kill()
            self.report.kills += 1
        self._start()
        self.report.recovery_s.append(client.stat()["recovery"]["duration_s"])

    def _check(self, client: Client, load: Load, tree: int, *, thorough: bool) -> None:
        """With the workers paused, look for all that was promised and all that was deleted."""
        report = self.report
        held = load.pause()
        report.ended_sequences += max(0, client.stat()["sequences"] - held)
        chains = longest(tree, load.promises())
        for found in look_up(client, chains):
            report.promised(found)
        if not thorough:
            chains = self._chance.sample(chains, min(len(chains), SAMPLE))
        for found in read(client, chains):
            report.promised(found)
            self._pulse()
        for found in look_up(client, self._deleted):
            report.deleted(found)
        report.checksum_failures += sum(
            int(self._daemon.metric("tierkv_checksum_failures_total", tier=tier.label))
            for tier in Tier
        )
        self._say()
        if report.broken_promises:
            raise Broken(f"broken promises: {report.broken_promises}")
        quarantined = os.listdir(self._daemon.quarantine)
        if quarantined:
            raise Broken(f"recovery found damage in {quarantined}: {self._daemon.last_words()}")
        load.go_on()

    def _start(self) -> None:
        self._pulse()
        self._before_start(self._daemon)
        self._daemon.start()

    def _await_a_worker(self, client: Client, load: Load) -> None:
        """Return when one worker is back; others may still be on their way."""
        deadline = time.monotonic() + WAIT_S
        while client.stat()["connections"] < 2:
            load.check_workers()
            self._pulse()
            if time.monotonic() > deadline:
                raise Broken("no worker comes back")
            time.sleep(0.01)

    def _is_over(self) -> bool:
        return (
            self._is_stopped()
            or self.report.kills >= self._plan.kills
            or time.monotonic() >= self._ends_s
        )

    def _say(self) -> None:
        report = self.report
        left_s = self._ends_s - time.monotonic()
        left = f", {max(left_s, 0):.0f} s to go" if left_s < float("inf") else ""
        self._progress(
            f"kill {report.kills}: {report.acknowledged:,} blocks acknowledged, "
            f"{report.lost:,} lost, {report.wrong:,} wrong, {report.resurrected:,} resurrected"
            + left
        )

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What never happens to sound software becomes the report's failure; the files stay."""
        try:
            yield
        except (Broken, TierkvError) as error:
            self.report.seen_wrong += isinstance(error, SawWrongBytes)
            self.report.failure = str(error)
            arenas = self._daemon.arenas
            if arenas.exists():
                # By cp, which leaves the holes in these files holes: all else in them is small.
                subprocess.run(["cp", "-r", arenas, self._daemon.folder / "arenas"], check=False)
