"""The store's file system is full: what works goes on, the rest ends in order, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.daemon import Daemon
from tests.crash.full_disk import SmallDisk
from tests.crash.pattern import SMALL
from tests.crash.prompts import TOKENS, found, prompt, store
from tierkv.errors import TierkvError, Unavailable
from tierkv.service.ballast import INDEX_BYTES, NAME
from tierkv.service.daemon import EXIT_FAILED, EXIT_IO

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mkfs.ext4") is None,
    reason="needs root and mkfs.ext4, to mount a small file system",
)

MIB = 1 << 20
SEGMENT_BYTES = 64 << 10
ROUNDS_MAX = 2000
"""More than a full disk lets through; a test that reaches it fails."""


on_ext4_too = pytest.mark.parametrize("file_system", ["tmpfs", "ext4"])


@pytest.fixture
def file_system() -> str:
    return "tmpfs"


@pytest.fixture
def disk(file_system: str) -> Iterator[SmallDisk]:
    with SmallDisk(file_system, 16 * MIB) as disk:
        yield disk


@pytest.fixture
def daemon(disk: SmallDisk) -> Iterator[Daemon]:
    with Daemon(
        server__state_dir=str(disk.path / "state"),
        disk__dir=str(disk.path / "state" / "data"),
        disk__bytes="6MiB",
        disk__segment_bytes="1MiB",
        wal__segment_bytes=str(SEGMENT_BYTES),
        wal__checkpoint_s="1h",
        index__map_bytes="8MiB",
    ) as daemon:
        yield daemon


def stored(daemon: Daemon, first: int, count: int) -> None:
    with daemon.connect(reconnect_s=1.0) as client:
        namespace = client.namespace(SMALL)
        for number in range(first, first + count):
            store(namespace, prompt(number))


def ballast(disk: SmallDisk) -> Path:
    return disk.path / "state" / NAME


def fill_up_behind(daemon: Daemon, disk: SmallDisk) -> None:
    """Fill the disk when the daemon has made the room for its next death."""
    with daemon.connect(reconnect_s=1.0) as client:
        client.flush()
    daemon.wait_for(lambda: ballast(disk).exists(), "the ballast")
    daemon.kill()
    assert ballast(disk).stat().st_size == SEGMENT_BYTES + INDEX_BYTES
    # The spare would do for the segment that a recovery makes.
    (disk.path / "state" / "wal" / "next.tmp").unlink()
    disk.fill_up()


@on_ext4_too
def test_a_start_on_a_full_disk_works_and_loses_nothing(daemon: Daemon, disk: SmallDisk) -> None:
    daemon.start()
    stored(daemon, 0, 8)
    fill_up_behind(daemon, disk)
    daemon.start()
    with daemon.connect(reconnect_s=1.0) as client:
        assert found(client, range(8)) == list(range(8))
    assert "without the ballast" in daemon.last_words()
    stored(daemon, 8, 4)
    # The new segment took a part of the ballast; what is left is held back for the next start.
    daemon.wait_for(lambda: ballast(disk).exists(), "the ballast")
    assert ballast(disk).stat().st_size < SEGMENT_BYTES + INDEX_BYTES
    disk.fill_up()
    daemon.kill()
    daemon.start()
    with daemon.connect(reconnect_s=1.0) as client:
        assert found(client, range(12)) == list(range(12))
    disk.make_room()
    stored(daemon, 12, 4)
    with daemon.connect(reconnect_s=1.0) as client:
        client.flush()
    daemon.wait_for(lambda: ballast(disk).exists(), "the ballast")
    daemon.kill()
    daemon.forget_ram()
    assert daemon.verify().findings == []
    daemon.start()
    with daemon.connect(reconnect_s=1.0) as client:
        assert found(client, range(16)) == list(range(16))
    assert daemon.stop() == 0


@on_ext4_too
def test_a_log_without_room_ends_the_daemon_and_every_acknowledged_block_survives(
    daemon: Daemon, disk: SmallDisk
) -> None:
    daemon.settings["wal.checkpoint_bytes"] = str(8 * MIB)
    daemon.start()
    daemon.wait_for(lambda: ballast(disk).exists(), "the ballast")
    disk.fill_up()
    acknowledged = 0
    with daemon.connect(reconnect_s=0.2) as client:
        namespace = client.namespace(SMALL)
        with contextlib.suppress(Unavailable):
            for number in range(ROUNDS_MAX):
                store(namespace, prompt(number))
                acknowledged += 1
    assert daemon.ended() == EXIT_IO, daemon.last_words()
    assert "the log cannot be written" in daemon.last_words()
    assert daemon.verify().findings == []
    # Only what the device tier still holds can be found: the disk took nothing.
    device_blocks = 8 * MIB // SMALL.block_bytes
    assert 10 < acknowledged * 5 < device_blocks, acknowledged
    for round_number in range(2):
        daemon.start()
        with daemon.connect(reconnect_s=1.0) as client:
            namespace = client.namespace(SMALL)
            known = [namespace.lookup(prompt(number)).tokens for number in range(acknowledged)]
            assert known == [TOKENS] * acknowledged
            # To read them all would fill the log once more.
            some = range(round_number, acknowledged, 10)
            assert found(client, some) == list(some)
        daemon.kill()
    disk.make_room()
    daemon.start()
    with daemon.connect(reconnect_s=1.0) as client:
        client.flush()
        assert found(client, range(acknowledged)) == list(range(acknowledged))
    assert daemon.stop() == 0
    assert daemon.verify().findings == []


def test_without_ballast_a_start_on_a_full_disk_says_what_to_free_and_changes_nothing(
    daemon: Daemon, disk: SmallDisk
) -> None:
    daemon.start()
    stored(daemon, 0, 8)
    fill_up_behind(daemon, disk)
    ballast(disk).unlink()
    disk.fill_up()
    for _ in range(2):
        daemon.launch()
        assert daemon.ended() == EXIT_FAILED
        words = daemon.last_words()
        assert f"Free {SEGMENT_BYTES + INDEX_BYTES} bytes" in words
        assert "Traceback" not in words
    disk.make_room()
    assert daemon.verify().findings == []
    daemon.start()
    with daemon.connect(reconnect_s=1.0) as client:
        assert found(client, range(8)) == list(range(8))
    assert daemon.stop() == 0


def test_a_disk_that_fills_up_under_load_costs_copies_on_it_and_nothing_else(
    daemon: Daemon, disk: SmallDisk
) -> None:
    daemon.start()
    stored(daemon, 0, 8)
    with daemon.connect(reconnect_s=1.0) as client:
        client.flush()
        daemon.wait_for(lambda: ballast(disk).exists(), "the ballast")
        disk.fill_up()
        # Far more than the disk tier's segment holds that is there already.
        stored(daemon, 8, 60)
        daemon.wait_for(
            lambda: client.stat()["tiers"]["disk"]["state"] == "failed", "the outage to be seen"
        )
        with pytest.raises(TierkvError):
            client.flush()
        assert found(client, range(68)) == list(range(68))
        disk.make_room()
        daemon.wait_for(
            lambda: client.stat()["tiers"]["disk"]["state"] == "ok", "the disk to come back"
        )
        client.flush()
    daemon.kill()
    daemon.forget_ram()
    daemon.start()
    with daemon.connect(reconnect_s=1.0) as client:
        assert found(client, range(68)) == list(range(68))
