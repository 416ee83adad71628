"""Stopping, starting, and starting on a store that was damaged meanwhile."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crash.daemon import Daemon
from tests.crash.pattern import SMALL, payload, put, wrong_token
from tierkv.client.sync import Client, Namespace, Sequence

PROMPTS = [[100 * n + t for t in range(40)] for n in range(1, 9)]
BLOCKS = 5
"""Full blocks of each prompt."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        daemon.start()
        yield daemon


@pytest.fixture(scope="module")
def original() -> Iterator[Daemon]:
    """A killed daemon's store with all prompts, in RAM and on disk."""
    with Daemon() as daemon:
        daemon.start()
        stored(daemon)
        daemon.kill()
        yield daemon


@pytest.fixture
def killed(original: Daemon) -> Iterator[Daemon]:
    """A copy of that store; its daemon is not running."""
    with Daemon() as daemon:
        for source, target in ((original.state, daemon.state), (original.arenas, daemon.arenas)):
            copy = ["cp", "--recursive", "--sparse=always", f"{source}/.", target]
            subprocess.run(copy, check=True)
        yield daemon


def store(namespace: Namespace, tokens: list[int]) -> Sequence:
    """A sequence on these tokens; writes what is not cached."""
    sequence = namespace.begin(tokens, keep=0)
    have = sequence.num_tokens
    rest = tokens[have:]
    sequence.reserve(len(rest))
    put(SMALL, namespace.pool, sequence.block_table, have, payload(SMALL, tokens)[have:])
    sequence.append(rest)
    return sequence


def stored(daemon: Daemon) -> None:
    """Put all prompts into a running daemon, on disk too."""
    with daemon.connect() as client:
        namespace = client.namespace(SMALL)
        for tokens in PROMPTS:
            store(namespace, tokens).end()
        client.flush()


def read(namespace: Namespace) -> list[int]:
    """Blocks that are read of each prompt; none of their bytes may be wrong."""
    counts = []
    for tokens in PROMPTS:
        out = np.zeros((BLOCKS, SMALL.block_bytes), np.uint8)
        counts.append(namespace.read(tokens, out))
        rows = out[: counts[-1]].reshape(-1, SMALL.token_bytes)
        assert np.array_equal(rows, payload(SMALL, tokens)[: len(rows)])
    return counts


def found(client: Client) -> list[int]:
    """Tokens found of each prompt; none of their bytes may be wrong."""
    namespace = client.namespace(SMALL)
    counts = []
    for tokens in PROMPTS:
        with namespace.begin(tokens, keep=0) as sequence:
            at = wrong_token(SMALL, namespace.pool, sequence.block_table, sequence.tokens)
            assert at is None, f"wrong bytes at token {at} of {tokens}"
            counts.append(sequence.num_tokens)
    return counts


def computed_again(namespace: Namespace, tokens: list[int]) -> int:
    """Begin as an engine does, which computes the last token again, and so the last block.

    Returns the tokens found. Wherever the blocks come from, their bytes must be right.
    """
    with namespace.begin(tokens) as sequence:
        have = sequence.num_tokens
        sequence.reserve(len(tokens) - have)
        put(SMALL, namespace.pool, sequence.block_table, have, payload(SMALL, tokens)[have:])
        sequence.append(tokens[have:])
        at = wrong_token(SMALL, namespace.pool, sequence.block_table, sequence.tokens)
        assert at is None, f"wrong bytes at token {at} of {tokens}"
        return have


def repaired(daemon: Daemon) -> None:
    """Store all prompts again: afterwards they are whole on disk."""
    with daemon.connect() as client:
        namespace = client.namespace(SMALL)
        for tokens in PROMPTS:
            computed_again(namespace, tokens)
        client.flush()
    daemon.kill()
    daemon.forget_ram()
    assert daemon.verify().findings == []
    daemon.start()
    with daemon.connect() as client:
        assert found(client) == [40] * len(PROMPTS)


def flip(path: Path, offset: int, count: int = 1) -> None:
    """Invert bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        data = file.read(count)
        assert len(data) == count
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in data))


def places(path: Path, needle: bytes) -> list[int]:
    """Where the bytes occur in a file."""
    data = path.read_bytes()
    at, result = data.find(needle), []
    while at >= 0:
        result.append(at)
        at = data.find(needle, at + 1)
    return result


def block_payload(tokens: list[int], block: int) -> bytes:
    size = SMALL.block_tokens
    return payload(SMALL, tokens)[block * size : (block + 1) * size].tobytes()


def segment(daemon: Daemon) -> Path:
    (path,) = daemon.data.glob("*.seg")
    return path


# --- stopping and starting ------------------------------------------------------------------------


def test_reading_goes_on_while_no_daemon_runs_and_under_the_next(daemon: Daemon) -> None:
    stored(daemon)
    with daemon.connect() as client:
        namespace = client.namespace(SMALL)
        assert read(namespace) == [BLOCKS] * len(PROMPTS)
        daemon.kill()
        assert read(namespace) == [BLOCKS] * len(PROMPTS)
        daemon.start()
        assert read(namespace) == [BLOCKS] * len(PROMPTS)
        before = client.stat()["epoch"]
        assert before == client.epoch
    with daemon.connect() as client, pytest.MonkeyPatch.context() as patch:
        namespace = client.namespace(SMALL)
        patch.setattr(client, "_run", None)  # what outlived the daemon was entered anew
        assert read(namespace) == [BLOCKS] * len(PROMPTS)


def test_a_worker_goes_over_to_a_new_arena_when_it_asks(daemon: Daemon) -> None:
    """It reads the old one's blocks as long as it finds what it wants there."""
    stored(daemon)
    with daemon.connect() as client:
        namespace = client.namespace(SMALL)
        daemon.kill()
        for path in daemon.arenas.iterdir():
            path.unlink()
        daemon.start()
        assert read(namespace) == [BLOCKS] * len(PROMPTS)
        client.stat()
        out = np.zeros((BLOCKS, SMALL.block_bytes), np.uint8)
        assert namespace._core.read_here(PROMPTS[0], out, None).copied == 0
        assert read(namespace) == [BLOCKS] * len(PROMPTS)  # from disk
        assert namespace._core.read_here(PROMPTS[0], out, None).copied == BLOCKS


def test_a_clean_stop_and_start_loses_nothing(daemon: Daemon) -> None:
    stored(daemon)
    assert daemon.stop() == 0
    assert not Path(daemon.socket).exists()
    assert daemon.verify().findings == []
    daemon.start()
    with daemon.connect() as client:
        assert found(client) == [40] * len(PROMPTS)
        assert client.stat()["recovery"]["records"] == 0


def test_a_stop_writes_to_disk_what_was_only_in_ram(daemon: Daemon) -> None:
    with daemon.connect() as client:
        namespace = client.namespace(SMALL)
        for tokens in PROMPTS:
            store(namespace, tokens).end()
    assert daemon.stop() == 0
    daemon.forget_ram()
    daemon.start()
    with daemon.connect() as client:
        assert found(client) == [40] * len(PROMPTS)


SINCE_THE_START = ("lookup_tokens", "hit_tokens")
"""What of a namespace's status no daemon knows of the one before."""


def state_of(client: Client) -> dict[str, Any]:
    status = client.stat()
    namespace = client.namespace(SMALL)
    kept = {key: status[key] for key in ("blocks", "sequences")}
    kept["namespaces"] = [
        {key: value for key, value in one.items() if key not in SINCE_THE_START}
        for one in status["namespaces"]
    ]
    kept["tiers"] = {
        name: (tier["blocks"], tier["used_bytes"]) for name, tier in status["tiers"].items()
    }
    kept["lookups"] = [namespace.lookup(tokens) for tokens in PROMPTS]
    return kept


def test_recovering_twice_gives_the_same_state() -> None:
    # Blocks go to disk when they are evicted only, so no write changes anything meanwhile.
    with Daemon(disk__write="demote", device__bytes="96KiB", host__bytes="64KiB") as daemon:
        daemon.start()
        with daemon.connect() as client:
            namespace = client.namespace(SMALL)
            for tokens in PROMPTS:
                store(namespace, tokens).end()
            sequence = store(namespace, PROMPTS[0])
            before = state_of(client)
            assert {tier for lookup in before["lookups"] for tier in range(1, 4) if lookup[tier]}
            for _ in range(2):
                daemon.restart()
                assert state_of(client) == before
            daemon.kill()
            daemon.launch()
            daemon.kill()
            daemon.start()
            assert state_of(client) == before
            assert not sequence.lost


def test_a_second_daemon_on_the_same_state_is_refused(daemon: Daemon) -> None:
    with Daemon() as second:
        second.settings["server.state_dir"] = str(daemon.state)
        second.launch()
        assert second.process is not None
        assert second.process.wait(20) == 75
        assert "in use by another tierkv process" in second.last_words()
    with daemon.connect() as client:
        assert client.stat()["state"] == "serving"


def test_a_second_daemon_on_the_same_socket_is_refused(daemon: Daemon) -> None:
    with Daemon() as second:
        second.settings["server.socket"] = daemon.socket
        second.launch()
        assert second.process is not None
        assert second.process.wait(20) == 78
        assert "another process listens here" in second.last_words()
    with daemon.connect() as client:
        assert client.stat()["state"] == "serving"


def test_with_durability_power_the_first_begin_after_a_restart_is_answered() -> None:
    # Nothing else is asked that would make the daemon sync its log.
    with Daemon(wal__durability="power") as daemon:
        daemon.start()
        with daemon.connect() as client:
            store(client.namespace(SMALL), PROMPTS[0]).end()
        daemon.restart()
        with daemon.connect(reconnect_s=10) as client:
            assert client.namespace(SMALL).begin(PROMPTS[0], keep=0).num_tokens == 40


# --- damage at rest -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["payload", "header"])
def test_a_damaged_disk_slot_is_a_miss(killed: Daemon, where: str) -> None:
    killed.forget_ram()
    (at,) = places(segment(killed), block_payload(PROMPTS[0], 2))
    flip(segment(killed), at + 1234 if where == "payload" else at - 4096 + 40)
    report = killed.verify()
    assert (report.slots_checked, report.slots_damaged) == (40, 1)
    killed.start()
    with killed.connect() as client:
        assert found(client) == [16, *[40] * 7]
    assert killed.metric("tierkv_checksum_failures_total", tier="disk") == 1
    repaired(killed)


def test_a_segment_that_was_cut_off_loses_only_what_lay_behind(killed: Daemon) -> None:
    killed.forget_ram()
    (at,) = places(segment(killed), block_payload(PROMPTS[4], 3))
    os.truncate(segment(killed), at + 100)
    killed.start()
    with killed.connect() as client:
        counts = found(client)
    assert counts == [40, 40, 40, 40, 24, 0, 0, 0]
    assert killed.metric("tierkv_checksum_failures_total", tier="disk") > 0
    repaired(killed)


def test_a_segment_that_is_gone_is_a_miss(killed: Daemon) -> None:
    killed.forget_ram()
    segment(killed).unlink()
    killed.start()
    with killed.connect() as client:
        assert found(client) == [0] * len(PROMPTS)


@pytest.mark.parametrize("on_disk", [True, False])
def test_damaged_payload_in_the_device_arena_is_read_from_disk_or_else_a_miss(
    on_disk: bool,
) -> None:
    with Daemon(disk__write="through" if on_disk else "demote") as daemon:
        daemon.start()
        with daemon.connect() as client:
            namespace = client.namespace(SMALL)
            for tokens in PROMPTS:
                store(namespace, tokens).end()
            if on_disk:
                client.flush()
        daemon.kill()
        arena = daemon.arenas / "device.arena"
        places_of = _device_places(arena)
        flip(arena, places_of[0, 4] + 77, 3)
        flip(arena, places_of[1, 1] + 4095)
        daemon.start()
        with daemon.connect() as client:
            # It computes the last block again: the damaged twin must not take its place.
            assert computed_again(client.namespace(SMALL), PROMPTS[0]) == 32
            assert found(client) == [40, 40 if on_disk else 8, *[40] * 6]
        assert daemon.metric("tierkv_checksum_failures_total", tier="device") == 2
        repaired(daemon)


def _device_places(arena: Path) -> dict[tuple[int, int], int]:
    """Offset of each prompt's blocks in the device arena."""
    stride = SMALL.block_bytes
    with arena.open("rb") as file:
        data = file.read(2 * BLOCKS * len(PROMPTS) * stride)
    return {
        (number, block): data.index(block_payload(tokens, block))
        for number, tokens in enumerate(PROMPTS)
        for block in range(BLOCKS)
    }


def test_a_damaged_arena_table_drops_only_the_copies_it_describes(killed: Daemon) -> None:
    # Behind two pages of header: one entry of 104 bytes per slot.
    flip(killed.arenas / "device.table", 8192 + 104 * 7 + 66)
    killed.start()
    with killed.connect() as client:
        recovery = client.stat()["recovery"]["tiers"]
        assert recovery["device"] == {"kept": 39, "dropped": 1}
        assert found(client) == [40] * len(PROMPTS)


def test_a_damaged_arena_header_makes_a_new_arena(killed: Daemon) -> None:
    flip(killed.arenas / "device.table", 20)
    killed.start()
    with killed.connect() as client:
        assert client.stat()["recovery"]["tiers"]["device"]["kept"] == 0
        assert found(client) == [40] * len(PROMPTS)


def test_a_damaged_arena_under_a_living_worker_never_reaches_another_one(daemon: Daemon) -> None:
    with daemon.connect() as client, daemon.connect() as other:
        sequence = store(client.namespace(SMALL), PROMPTS[0])
        daemon.kill()
        flip(daemon.arenas / "device.arena", _device_places_of(daemon, PROMPTS[0], 1) + 9)
        daemon.start()
        sequence.reserve(1)
        namespace = other.namespace(SMALL)
        with namespace.begin(PROMPTS[0], keep=0) as theirs:
            assert theirs.num_tokens == 8
            assert wrong_token(SMALL, namespace.pool, theirs.block_table, theirs.tokens) is None


def _device_places_of(daemon: Daemon, tokens: list[int], block: int) -> int:
    with (daemon.arenas / "device.arena").open("rb") as file:
        return file.read(1 << 20).index(block_payload(tokens, block))


def test_a_log_damaged_in_the_middle_keeps_what_the_checkpoint_and_the_start_of_it_say() -> None:
    with Daemon(wal__checkpoint_s="1h") as daemon:
        daemon.start()
        with daemon.connect() as client:
            namespace = client.namespace(SMALL)
            for tokens in PROMPTS[:4]:
                store(namespace, tokens).end()
            client.flush()
            for tokens in PROMPTS[4:]:
                store(namespace, tokens).end()
        daemon.kill()
        log = max((daemon.state / "wal").glob("*.wal"))
        frames = places(log, b"TKF1")
        flip(log, frames[len(frames) * 3 // 4] + 70)
        daemon.start()
        with daemon.connect() as client:
            counts = found(client)
            assert counts[:4] == [40] * 4
            assert client.stat()["state"] == "serving"
        repaired(daemon)


def test_a_log_damaged_in_front_of_what_was_synced_goes_to_quarantine() -> None:
    with Daemon(wal__checkpoint_s="1h", wal__durability="power") as daemon:
        daemon.start()
        with daemon.connect() as client:
            namespace = client.namespace(SMALL)
            for tokens in PROMPTS:
                store(namespace, tokens).end()
        daemon.kill()
        log = max((daemon.state / "wal").glob("*.wal"))
        frames = places(log, b"TKF1")
        flip(log, frames[len(frames) // 2] + 70)
        assert any("log" in finding for finding in daemon.verify().findings)
        daemon.start()
        assert [path.name for path in daemon.quarantine.iterdir()] == [log.name]
        with daemon.connect() as client:
            counts = found(client)
        assert counts[0] == 40
        assert counts[-1] == 0


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.99])
def test_an_index_that_was_cut_off_goes_to_quarantine(killed: Daemon, share: float) -> None:
    # To map such a file and read behind its end would kill the daemon.
    data = killed.state / "index" / "data.mdb"
    os.truncate(data, int(data.stat().st_size * share))
    assert killed.verify().findings
    killed.start()
    assert any(path.name.startswith("index") for path in killed.quarantine.iterdir())
    with killed.connect() as client:
        # Kept or not: never wrong.
        found(client)
    repaired(killed)


def test_a_format_file_without_its_checksum_is_refused(killed: Daemon) -> None:
    file = killed.state / "FORMAT"
    whole = file.read_text()
    file.write_text(whole.splitlines()[0] + "\n")
    killed.launch()
    assert killed.process is not None
    assert killed.process.wait(20) == 1
    assert f"{file} is damaged; move {killed.state} aside" in killed.last_words()
    assert not Path(killed.socket).exists()
    file.write_text(whole)
    killed.start()
    with killed.connect() as client:
        assert found(client) == [40] * len(PROMPTS)
