"""The C library refuses calls at random (libfiu), at the start and while the daemon serves.

One store lives through all rounds. TIERKV_CRASH_SEED and TIERKV_CRASH_ROUNDS choose the run.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import Counter

import pytest

from tests.crash.daemon import Daemon
from tests.crash.pattern import SMALL
from tests.crash.prompts import found, prompt, store
from tierkv.client.sync import Client
from tierkv.errors import TierkvError, Unavailable
from tierkv.service.daemon import EXIT_FAILED, EXIT_IO, EXIT_OK

SEED = int(os.environ.get("TIERKV_CRASH_SEED", "20251"))
ROUNDS = int(os.environ.get("TIERKV_CRASH_ROUNDS", "6"))
STORES = 60
"""Prompts that a daemon is asked to store in a round, if it lives so long."""

EIO, ENOSPC = 5, 28
FAULTS = {
    "posix/io/sync/fdatasync": EIO,
    "posix/io/sync/fsync": EIO,
    "posix/io/rw/pwrite": ENOSPC,
}
PROBABILITIES = (0.002, 0.01, 0.05)


def luck(chance: random.Random) -> list[str]:
    """What fails in a round, as fiu-run's arguments."""
    arguments = []
    for name in chance.sample(list(FAULTS), chance.randint(1, len(FAULTS))):
        probability = chance.choice(PROBABILITIES)
        what = f"name={name},probability={probability},failinfo={FAULTS[name]}"
        arguments += ["-c", f"enable_random {what}"]
    return arguments


@pytest.mark.slow
@pytest.mark.timeout(60 + 15 * ROUNDS)
@pytest.mark.skipif(shutil.which("fiu-run") is None, reason="needs fiu-run (fiu-utils)")
def test_random_refusals_lose_nothing_that_was_acknowledged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(SEED)
    ends: Counter[str] = Counter()
    acknowledged: list[int] = []
    with Daemon(
        module="tests.crash.unlucky",
        disk__segment_bytes="1MiB",
        wal__durability="power",
        wal__segment_bytes="64KiB",
        wal__checkpoint_bytes="64KiB",
        wal__checkpoint_s="0.2s",
    ) as daemon:
        for number in range(ROUNDS):
            seed, arguments = chance.randrange(2**31), luck(chance)
            at = f"TIERKV_CRASH_SEED={SEED}, round {number}: seed {seed}, {arguments}"
            daemon.environment["TIERKV_CRASH_SEED"] = str(seed)
            daemon.module = "tests.crash.unlucky"
            daemon.launch("fiu-run", "-x", *arguments)
            ended = _work(daemon, range(STORES * number, STORES * (number + 1)), acknowledged)
            ends[f"exit {ended}"] += 1
            words = f"{at}\n{daemon.last_words()}"
            assert ended in (EXIT_OK, EXIT_IO, EXIT_FAILED), words
            assert "Traceback" not in daemon.last_words(), words
            assert daemon.verify().findings == [], words
            daemon.module = "tierkv"
            if number % 2:
                daemon.forget_ram()
            daemon.start()
            with daemon.connect() as client:
                assert found(client, acknowledged) == acknowledged, words
            assert not os.listdir(daemon.quarantine), words
            assert daemon.stop() == 0, words
    assert acknowledged
    with capsys.disabled():
        print(f"\nTIERKV_CRASH_SEED={SEED}, {len(acknowledged)} prompts acknowledged, {ends}")


def _work(daemon: Daemon, numbers: range, acknowledged: list[int]) -> int:
    """Store prompts until the daemon has had enough; returns how it ended."""
    if not daemon.serves():
        return daemon.ended()
    with contextlib.suppress(Unavailable), daemon.connect(reconnect_s=0.2) as client:
        for number in numbers:
            _try_to_store(client, number, acknowledged)
    return daemon.stop()


def _try_to_store(client: Client, number: int, acknowledged: list[int]) -> None:
    """Note the prompt if the daemon says that it has it."""
    try:
        store(client.namespace(SMALL), prompt(number))
    except Unavailable:
        raise
    except TierkvError:
        return
    acknowledged.append(number)
