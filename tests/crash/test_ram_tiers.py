"""The RAM tiers outlive the daemon, kept as files or by a service manager, and only as a whole."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.daemon import Daemon
from tests.crash.eight_prompts import ALL, NONE, PROMPTS, adopted, check, fill, found, write
from tests.crash.pattern import SMALL
from tests.crash.supervisor import ARENAS, SupervisedDaemon, supervised
from tierkv.errors import LeaseLost

SPILLING = {"device__bytes": "96KiB", "host__bytes": "160KiB", "disk__bytes": "0"}
"""24 blocks in device, 40 in host: the prompts' 40 blocks need both. No disk at all."""


@pytest.fixture(params=["files", "manager"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon without disk, whose RAM tiers are kept in the one way or the other."""
    if request.param == "files":
        with Daemon(**SPILLING) as daemon:
            daemon.start()
            yield daemon
    else:
        with supervised(tmp_path, **SPILLING) as daemon:
            daemon.start()
            yield daemon


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[SupervisedDaemon]:
    """A daemon without disk whose RAM tiers the service manager keeps, with all prompts."""
    with supervised(tmp_path, **SPILLING) as daemon:
        daemon.start()
        with daemon.connect() as client:
            fill(client)
        yield daemon


def memfds(pid: int) -> set[str]:
    """Names of the memfds that a process has open."""
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {
        link.removeprefix("/memfd:").removesuffix(" (deleted)")
        for link in links
        if link.startswith("/memfd:")
    }


def test_blocks_and_sequences_outlive_every_kill_without_a_disk(daemon: Daemon) -> None:
    with daemon.connect() as client:
        fill(client)
        namespace = client.namespace(SMALL)
        sequence = namespace.begin(PROMPTS[0])
        for generation in range(3):
            tokens = [*PROMPTS[0], *range(13 * (generation + 1))]
            write(namespace, sequence, tokens)
            daemon.restart()
            # What comes is known from the old process's memory alone: there is no other copy.
            assert adopted(client) == ["device", "host"]
            assert sequence.tokens.tolist() == tokens
            sequence.reserve(0)
            check(namespace, sequence)
            assert found(client) == ALL
        assert not sequence.lost
        assert client.stat()["recovery"]["dropped_blocks"] == 0
    assert not list(daemon.folder.rglob("*.seg"))


@pytest.mark.parametrize("keep", ["files", "manager"])
def test_a_warm_restart_reads_nothing_from_the_disk_tier(keep: str, tmp_path: Path) -> None:
    def read_from_disk() -> float:
        return daemon.metric("tierkv_transfer_bytes_total", from_tier="disk", to_tier="device")

    with supervised(tmp_path, arena__keep=keep) as daemon:
        daemon.start()
        with daemon.connect() as client:
            fill(client)
            client.flush()
            daemon.restart()
            assert found(client) == ALL
            with pytest.raises(KeyError, match="there is no metric"):
                read_from_disk()
            # The counter does count: without the memory, all comes from the disk.
            daemon.kill()
            daemon.forget_ram()
            daemon.supervisor.forget()
            daemon.start()
            assert found(client) == ALL
            assert read_from_disk() == 5 * len(PROMPTS) * SMALL.block_bytes


def test_the_manager_holds_each_part_once_however_often_the_daemon_dies(
    kept: SupervisedDaemon,
) -> None:
    first = [os.fstat(fd).st_ino for _, fd in kept.supervisor.passed_on()]
    for _ in range(3):
        kept.restart()
        assert [name for name, _ in kept.supervisor.passed_on()] == ARENAS
    assert [os.fstat(fd).st_ino for _, fd in kept.supervisor.passed_on()] == first
    assert not list(kept.arenas.iterdir())


def test_a_manager_that_lost_everything_gets_a_new_cold_cache(kept: SupervisedDaemon) -> None:
    with kept.connect() as client:
        sequence = client.namespace(SMALL).begin(PROMPTS[0])
        kept.kill()
        kept.supervisor.forget()
        kept.start()
        assert adopted(client) == []
        with pytest.raises(LeaseLost):
            sequence.reserve(1)
        assert found(client) == NONE
        fill(client)
        kept.restart()
        assert found(client) == ALL


@pytest.mark.parametrize("name", ARENAS)
def test_one_part_of_an_arena_is_as_good_as_none(kept: SupervisedDaemon, name: str) -> None:
    torn = "device" if "device" in name else "host"
    kept.kill()
    kept.supervisor.forget(name)
    kept.start()
    with kept.connect() as client:
        assert adopted(client) == [tier for tier in ("device", "host") if tier != torn]
        assert sorted(name for name, _ in kept.supervisor.passed_on()) == ARENAS
        assert sum(found(client)) < sum(ALL)
        fill(client)
        kept.restart()
        assert adopted(client) == ["device", "host"]
        assert found(client) == ALL


def test_two_of_a_kind_are_none(kept: SupervisedDaemon) -> None:
    kept.kill()
    kept.supervisor.stored["tierkv-device.arena"].append(os.memfd_create("other"))
    kept.start()
    with kept.connect() as client:
        assert adopted(client) == ["host"]
    assert sorted(name for name, _ in kept.supervisor.passed_on()) == ARENAS


def test_another_budget_gets_a_new_arena_and_the_old_one_is_given_back(
    kept: SupervisedDaemon,
) -> None:
    old = {os.fstat(fd).st_ino for _, fd in kept.supervisor.passed_on()}
    kept.kill()
    kept.settings["device.bytes"] = "128KiB"
    kept.start()
    with kept.connect() as client:
        assert adopted(client) == ["host"]
        found(client)
    assert sorted(name for name, _ in kept.supervisor.passed_on()) == ARENAS
    new = {os.fstat(fd).st_ino for _, fd in kept.supervisor.passed_on()}
    assert len(new & old) == 2
    kept.restart()
    with kept.connect() as client:
        assert adopted(client) == ["device", "host"]


def test_a_tier_that_is_switched_off_gives_its_memory_back(kept: SupervisedDaemon) -> None:
    kept.kill()
    kept.settings["host.bytes"] = "0"
    kept.start()
    assert [name for name, _ in kept.supervisor.passed_on()] == ARENAS[:2]


def test_what_is_not_ours_is_given_back(kept: SupervisedDaemon) -> None:
    kept.kill()
    kept.supervisor.stored["stranger"] = [os.memfd_create("stranger")]
    kept.start()
    assert [name for name, _ in kept.supervisor.passed_on()] == ARENAS
    assert "stranger" not in memfds(kept.pid)
    with kept.connect() as client:
        assert adopted(client) == ["device", "host"]


def test_changing_who_keeps_the_memory_leaves_none_behind(kept: SupervisedDaemon) -> None:
    for keep in ("files", "manager"):
        kept.kill()
        kept.settings["arena.keep"] = keep
        kept.start()
        with kept.connect() as client:
            assert adopted(client) == []
            assert found(client) == NONE
            fill(client)
        files = sorted(f"tierkv-{path.name}" for path in kept.arenas.iterdir())
        stored = [name for name, _ in kept.supervisor.passed_on()]
        assert (files, stored) == ((ARENAS, []) if keep == "files" else ([], ARENAS))
        kept.restart()
        with kept.connect() as client:
            assert found(client) == ALL


@pytest.mark.parametrize("name", ["rpc", "tierkv.socket"])
def test_a_socket_is_inherited_beside_the_arenas(tmp_path: Path, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        with supervised(tmp_path, [(name, listening.fileno())], **SPILLING) as daemon:
            daemon.socket = daemon.settings["server.socket"] = str(tmp_path / "s")
            daemon.start()
            with daemon.connect() as client:
                fill(client)
                daemon.restart()
                assert adopted(client) == ["device", "host"]
                assert found(client) == ALL


@pytest.mark.parametrize(
    ("manager", "exit_code", "words"),
    [("", 78, "no service manager listens"), ("/nowhere/notify", 1, "cannot be told")],
)
def test_without_a_manager_that_keeps_the_arenas_there_is_no_start(
    tmp_path: Path, manager: str, exit_code: int, words: str
) -> None:
    with supervised(tmp_path, arena__keep="manager", **SPILLING) as daemon:
        daemon.supervisor.path = manager
        daemon.launch()
        assert daemon.process is not None
        assert daemon.process.wait(20) == exit_code
        assert words in daemon.last_words()
