"""Power cuts under load, on real ext4 and xfs: only what reached the device is there afterwards.

One store lives through all the cuts of a case. The daemon is stopped first, so that no sync is
under way when the power goes: an acknowledgement is then either written down or was never sent.
Acknowledgements and RAM tiers lie on other file systems; the RAM tiers are lost at every cut.

TIERKV_CRASH_SEED and TIERKV_CRASH_CUTS choose the run.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field

import pytest

from tests.crash.daemon import Daemon
from tests.crash.load import Load, Promise, check_bytes, check_found, longest
from tests.crash.lossy_disk import LossyDisk, why_not
from tests.crash.pattern import SMALL, payload, put
from tierkv.client.sync import Client

SEED = int(os.environ.get("TIERKV_CRASH_SEED", "20252"))
CUTS = int(os.environ.get("TIERKV_CRASH_CUTS", "0"))
WORKERS = 2
SAMPLE = 12
VERIFY_EVERY = 8


@dataclass(frozen=True)
class Case:
    """``cuts``: how many. Durability ``power`` keeps every acknowledged seal, the others what a
    ``flush`` has returned for."""

    file_system: str
    durability: str
    cuts: int


CASES = [
    Case("ext4", "power", 26),
    Case("ext4", "kill", 10),
    Case("ext4", "none", 4),
    Case("xfs", "power", 14),
    Case("xfs", "kill", 6),
]


@pytest.mark.slow
@pytest.mark.timeout(600 if CUTS else 120)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.file_system}-{case.durability}-seed{SEED}"
)
def test_a_power_cut_takes_nothing_that_was_promised_and_leaves_nothing_wrong(case: Case) -> None:
    if reason := why_not(case.file_system):
        pytest.skip(reason)
    cuts = CUTS or case.cuts
    print(f"TIERKV_CRASH_SEED={SEED} TIERKV_CRASH_CUTS={cuts}")
    with (
        LossyDisk(case.file_system) as disk,
        Daemon(
            state=disk.path / "state",
            device__bytes="4MiB",
            host__bytes="1MiB",
            disk__bytes="160MiB",
            disk__segment_bytes="1MiB",
            wal__durability=case.durability,
            wal__segment_bytes="256KiB",
            wal__checkpoint_bytes="128KiB",
            wal__checkpoint_s="0.3s",
        ) as daemon,
    ):
        daemon.start()
        with (
            daemon.connect(timeout_s=30, reconnect_s=60) as client,
            Load(daemon, SEED, WORKERS) as load,
        ):
            try:
                storm = Storm(case, disk, daemon, load, client, random.Random(SEED))
                for number in range(1, cuts + 1):
                    storm.cut(thorough=number % VERIFY_EVERY == 0)
                load.stop()
                assert load.done["seals"], f"the load never came to seals: {load.done}"
            except BaseException as error:
                error.add_note(f"the daemon's log ends:\n{daemon.last_words()}")
                raise
        assert daemon.stop() == 0
        storm.check_store()


@dataclass
class Storm:
    """Power cuts, and what must hold after each."""

    case: Case
    disk: LossyDisk
    daemon: Daemon
    load: Load
    client: Client
    chance: random.Random
    epoch: int = 0
    flushed_at: dict[int, float] = field(default_factory=dict)
    """By epoch: when the last flush began that returned before the power went."""
    rounds: list[list[int]] = field(default_factory=list)

    def cut(self, *, thorough: bool) -> None:
        """Let the workers work for a moment, cut the power, start again, check."""
        self.load.await_a_worker(self.client)
        self.epoch = self.client.epoch
        self.daemon.prepare()
        self._put_and_get()
        if self.case.durability != "power" and self.chance.random() < 0.4:
            begun = time.monotonic()
            self.client.flush()
            self.flushed_at[self.epoch] = begun
        time.sleep(self.chance.uniform(0.02, 0.35))
        self._lose_power()
        if self.chance.random() < 0.15:
            # And once more, while it recovers.
            self.daemon.launch()
            time.sleep(self.chance.uniform(0.0, 0.15))
            self._lose_power()
        if thorough:
            self.check_store()
        self.daemon.start()
        self._check_recovery()
        self._check_promises()
        self.load.thaw()

    def check_store(self) -> None:
        """Of a stopped store: index, log, invariants, and every byte on disk."""
        report = self.daemon.verify()
        findings = report.findings
        if self.case.durability != "power":
            # A payload that was never synced, in a slot of which the log had been synced.
            findings = [finding for finding in findings if "on disk is damaged" not in finding]
        assert findings == []
        assert report.slots_checked

    def _lose_power(self) -> None:
        self.daemon.freeze()
        if self.chance.random() < 0.5:
            self.disk.write_back_some(self.chance)
        self.disk.lose_power()
        self.daemon.kill()
        self.load.freeze()
        self.disk.power_up()
        self.daemon.forget_ram()

    def _check_recovery(self) -> None:
        status = self.client.stat()
        assert status["state"] == "serving"
        assert status["epoch"] > self.epoch
        self.epoch = status["epoch"]
        assert not os.listdir(self.daemon.quarantine), "what was unsynced was taken for damage"
        if self.case.durability == "power":
            assert status["recovery"]["tiers"]["disk"]["dropped"] == 0

    def _check_promises(self) -> None:
        """The workers are frozen, so nobody repairs what is looked for."""
        promises = self.load.promises()
        kept = longest(SEED, [promise for promise in promises if self._must_be_kept(promise)])
        check_found(self.client, kept)
        check_bytes(self.client, self._some(kept), whole=True)
        check_bytes(self.client, self._some(longest(SEED, promises)), whole=False)
        own = [(SMALL.model, tokens) for tokens in self.rounds]
        check_bytes(self.client, own, whole=self.case.durability == "power")
        if self.case.durability == "power":
            assert self.daemon.metric("tierkv_checksum_failures_total", tier="disk") == 0

    def _must_be_kept(self, promise: Promise) -> bool:
        if self.case.durability == "power":
            return True
        return promise.at < self.flushed_at.get(promise.epoch, 0.0)

    def _some(self, chains: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
        return self.chance.sample(chains, min(len(chains), SAMPLE))

    def _put_and_get(self) -> None:
        """A put and a get of something new: what recovery left can be written on."""
        tokens = [self.chance.randrange(50_000) for _ in range(3 * SMALL.block_tokens)]
        namespace = self.client.namespace(SMALL)
        with namespace.begin(tokens) as sequence:
            sequence.reserve(len(tokens))
            put(SMALL, namespace.pool, sequence.block_table, 0, payload(SMALL, tokens))
            sequence.append(tokens)
        check_bytes(self.client, [(SMALL.model, tokens)], whole=True)
        self.rounds.append(tokens)
