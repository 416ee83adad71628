"""A full or failing disk: the daemon goes on with its RAM tiers, says so, and comes back."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.blocks import BLOCK, SPEC, check, fill, store, tokens
from tests.service.running import Daemon, running, until
from tierkv.errors import TierFailed

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root to mount a small file system for the disk tier"
)

MIB = 1 << 20
SLOT_BYTES = 12 << 10  # 8 KiB of payload behind a page of header
SEGMENT_BLOCKS = MIB // SLOT_BYTES


class SmallDisk:
    """A tmpfs of 8 MiB, of which a file takes as much as the test wants."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tierkv-t-", dir="/tmp"))
        _run("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(self.path))
        self._ballast = self.path / "ballast"

    def fill_up(self) -> None:
        """Leave no page free."""
        free = os.statvfs(self.path)
        with self._ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), free.f_bavail * free.f_frsize)

    def make_room(self) -> None:
        self._ballast.unlink()

    def mount_again(self, mode: str) -> None:
        """Refuse ("ro") or allow ("rw") to open files for writing, by this path."""
        if mode == "ro":
            _run("mount", "--bind", str(self.path), str(self.path))
            _run("mount", "-o", "remount,bind,ro", str(self.path))
        else:
            _run("umount", str(self.path))

    def close(self) -> None:
        while (
            subprocess.run(["umount", "-l", self.path], capture_output=True, check=False).returncode
            == 0
        ):
            pass
        self.path.rmdir()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    disk = SmallDisk()
    yield disk
    disk.close()


@pytest.fixture
def daemon(disk: SmallDisk) -> Iterator[Daemon]:
    settings = {
        "device.bytes": "2MiB",
        "host.bytes": "1MiB",
        "disk.bytes": "6MiB",
        "disk.segment_bytes": "1MiB",
        "disk.dir": str(disk.path / "data"),
    }
    with running(settings) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def disk_state(daemon: Daemon) -> str:
    return daemon.status()["tiers"]["disk"]["state"]


def said(daemon: Daemon, words: str) -> list[str]:
    return [line for line in daemon.said().splitlines() if words in line]


def break_and_mend(daemon: Daemon, disk: SmallDisk, break_, mend, why: str) -> None:
    """The whole life of an outage, with a worker that never notices."""
    with daemon.connect() as client:
        ns = client.namespace(SPEC)
        saved, unsaved = tokens(SEGMENT_BLOCKS, seed=300), tokens(SEGMENT_BLOCKS, seed=301)
        store(ns, saved)
        client.flush()
        assert client.stat()["tiers"]["disk"]["blocks"] == SEGMENT_BLOCKS

        break_()
        # More than a segment holds, so that a new one must be made.
        with fill(ns, unsaved) as sequence:
            until(lambda: disk_state(daemon) == "failed", "for the outage to be noticed")
            check(ns, sequence)
        with pytest.raises(TierFailed):
            client.flush()
        assert daemon.get("/readyz")[0] == 200
        metrics = daemon.metrics()
        assert metrics['tierkv_tier_in_service{tier="disk"}'] == 0
        assert metrics['tierkv_tier_trips_total{tier="disk"}'] == 1
        (problem,) = [
            one for one in daemon.status()["problems"] if "out of service" in one["message"]
        ]
        assert (problem["level"], problem["fields"]["tier"]) == ("error", "disk")
        assert why in problem["message"]

        # Under pressure blocks without another copy go to the host tier, not to nowhere.
        store(ns, tokens(SEGMENT_BLOCKS, seed=302))
        with fill(ns, unsaved) as sequence:
            assert sequence.cached_tokens == SEGMENT_BLOCKS * BLOCK
        # And what is on disk can still be read.
        with ns.begin(saved, keep=0) as sequence:
            assert sequence.cached_tokens == SEGMENT_BLOCKS * BLOCK
            check(ns, sequence)

        mend()
        until(lambda: said(daemon, "in service again"), "for the disk to come back")
        assert disk_state(daemon) == "ok"
        client.flush()
        in_ram = [ids for ids in (saved, unsaved) if ns.lookup(ids).tokens == len(ids)]
        assert client.stat()["tiers"]["disk"]["blocks"] >= len(in_ram) * SEGMENT_BLOCKS
        for ids in (saved, unsaved):
            with fill(ns, ids) as sequence:
                assert sequence.cached_tokens == SEGMENT_BLOCKS * BLOCK

    outages = said(daemon, "out of service")
    assert len(outages) == 1
    assert "level=error" in outages[0]
    assert why in outages[0]
    assert not said(daemon, "Traceback")


def test_full_disk(daemon: Daemon, disk: SmallDisk) -> None:
    break_and_mend(daemon, disk, disk.fill_up, disk.make_room, "the file system is full")


def test_read_only_disk(daemon: Daemon, disk: SmallDisk) -> None:
    break_and_mend(
        daemon,
        disk,
        lambda: disk.mount_again("ro"),
        lambda: disk.mount_again("rw"),
        "Read-only file system",
    )


def test_a_disk_that_is_full_from_the_start(daemon: Daemon, disk: SmallDisk) -> None:
    """Not one segment can be made: all works, within the RAM tiers."""
    disk.fill_up()
    with daemon.connect() as client:
        ns = client.namespace(SPEC)
        for seed in range(310, 320):
            store(ns, tokens(64, seed=seed))
        assert ns.lookup(tokens(64, seed=319)).tokens == 64 * BLOCK
        assert disk_state(daemon) == "failed"
        # Live sequences are worth more than cached blocks. The host tier has room for two of
        # these; the third stays where it is, and lets others come and go around it.
        sleepers = [fill(ns, tokens(64, seed=330 + k)) for k in range(4)]
        for sleeper in sleepers[:3]:
            sleeper.suspend()
        sleepers.pop().end()
        store(ns, tokens(190, seed=340))
        for sleeper in sleepers:
            sleeper.resume()
            check(ns, sleeper)
        metrics = daemon.metrics()
        assert metrics['tierkv_checksum_failures_total{tier="device"}'] == 0
        assert metrics['tierkv_blocks{tier="disk"}'] == 0
