"""The state directory: who may use it, and what is done with one that cannot be understood."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from recovery_harness import SIZE, Daemon, Machine
from tierkv_wal.format import HEADER_BYTES

from tierkv.core.ids import Tier
from tierkv.errors import ConfigError, CorruptionError, NotReady, TierFailed
from tierkv.service.store import StateDirectory, new_store, read_format, recorded_sizes
from tierkv.tiers.index import Index

A = list(range(100, 100 + 3 * SIZE))
Start = Callable[..., Daemon]


def _filled(daemon: Daemon) -> None:
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.write_behind()
    daemon.write()


def _state(machine: Machine) -> Path:
    return machine.folder / "state"


def _quarantine(machine: Machine) -> list[str]:
    return sorted(path.name for path in (_state(machine) / "quarantine").iterdir())


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("lock.mdb", "LOCK")
    }


# --- the lock ---------------------------------------------------------------------------------


def test_one_daemon_at_a_time(folder: Path) -> None:
    first = StateDirectory.open(folder / "state")
    with pytest.raises(NotReady, match="in use by another tierkv process"):
        StateDirectory.open(folder / "state")
    first.close()
    StateDirectory.open(folder / "state").close()


def test_the_lock_goes_with_the_process(folder: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from tierkv.service.store import StateDirectory;"
        f"StateDirectory.open(Path({str(folder / 'state')!r})); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    path = ":".join(str(root / part) for part in ("", "wal", "kernels"))
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == -9
    StateDirectory.open(folder / "state").close()


def test_a_directory_that_cannot_be_made_is_a_mistake_in_the_configuration(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"server\.state_dir"):
        StateDirectory.open(folder / "file" / "state")


# --- FORMAT -----------------------------------------------------------------------------------


def test_the_format_comes_back(folder: Path) -> None:
    directory = StateDirectory.open(folder)
    assert directory.read_format() is None
    content = new_store(disk_segment_bytes=1, device_bytes=2, host_bytes=3, disk_bytes=4)
    directory.write_format(content)
    assert directory.read_format() == content
    assert recorded_sizes(folder) == {"device.bytes": 2, "host.bytes": 3, "disk.bytes": 4}
    directory.close()


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "garbage"])
def test_a_damaged_format_is_refused_and_nothing_is_touched(
    machine: Machine, start: Start, damage: str
) -> None:
    _filled(start())
    machine.crash()
    path = _state(machine) / "FORMAT"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "cut": whole[:-5],
            "flip": whole[:20] + bytes([whole[20] ^ 1]) + whole[21:],
            "garbage": b"\xff" * 4096,
        }[damage]
    )
    before = _files(_state(machine))
    with pytest.raises(CorruptionError, match="FORMAT is damaged"):
        start()
    assert _files(_state(machine)) == before
    assert recorded_sizes(_state(machine)) == {}
    path.write_bytes(whole)
    assert start().cached(A) == 3


def _rewrite(path: Path, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    path.write_bytes(body + b"\n" + xxhash.xxh3_64_hexdigest(body).encode() + b"\n")


@pytest.mark.parametrize(
    "content", [{"version": 3}, {"version": 3, "store": 5, "shards": [1]}, {"version": 99}]
)
def test_a_newer_format_is_refused_whatever_else_it_says(
    machine: Machine, start: Start, content: dict[str, Any]
) -> None:
    _filled(start())
    machine.crash()
    _rewrite(_state(machine) / "FORMAT", content)
    before = _files(_state(machine))
    with pytest.raises(ConfigError, match="use the newer version"):
        start()
    assert _files(_state(machine)) == before
    with pytest.raises(ConfigError):
        read_format(_state(machine))


def test_an_older_format_is_refused(machine: Machine, start: Start) -> None:
    _filled(start())
    machine.crash()
    _rewrite(_state(machine) / "FORMAT", {"version": 1})
    before = _files(_state(machine))
    with pytest.raises(ConfigError, match="use the older version, or move the directory aside"):
        start()
    assert _files(_state(machine)) == before


def test_fields_of_a_later_minor_kind_are_not_minded(machine: Machine, start: Start) -> None:
    _filled(start())
    machine.crash()
    path = _state(machine) / "FORMAT"
    content = json.loads(path.read_bytes().partition(b"\n")[0])
    _rewrite(path, content | {"colour": "blue"})
    assert start().cached(A) == 3


# --- newer logs, damaged parts ----------------------------------------------------------------


def test_a_newer_log_is_refused_and_nothing_is_set_aside(machine: Machine, start: Start) -> None:
    _filled(start())
    machine.crash()
    segment = sorted((_state(machine) / "wal").glob("*.wal"))[-1]
    whole = segment.read_bytes()
    page = bytearray(whole[:HEADER_BYTES])
    page[8:10] = (2).to_bytes(2, "little")
    page[-8:] = xxhash.xxh3_64_intdigest(bytes(page[:-8])).to_bytes(8, "little")
    segment.write_bytes(bytes(page) + whole[HEADER_BYTES:])
    before = _files(_state(machine))
    with pytest.raises(ConfigError, match="written by a newer tierkv"):
        start()
    assert _files(_state(machine)) == before
    assert _quarantine(machine) == []
    segment.write_bytes(whole)
    assert start().cached(A) == 3


def test_a_damaged_index_is_set_aside_with_the_log_and_made_anew(
    machine: Machine, start: Start
) -> None:
    daemon = start()
    _filled(daemon)
    daemon.checkpoint()
    machine.crash()
    data = _state(machine) / "index" / "data.mdb"
    data.write_bytes(data.read_bytes()[:12288])
    daemon = start()
    assert daemon.report.wal_end == "set aside"
    assert "damaged" in daemon.report.rebuilt
    assert _quarantine(machine) == ["0000000000000001.wal", "index.0"]
    assert len(daemon.report.quarantined) == 2
    assert daemon.cached(A) == 3
    daemon = start()
    assert daemon.report.wal_end == "clean"
    assert daemon.report.rebuilt == ""
    assert daemon.cached(A) == 3


def test_nothing_in_quarantine_is_ever_replaced(folder: Path) -> None:
    directory = StateDirectory.open(folder)
    for number in range(3):
        directory.index.mkdir()
        (directory.index / "data").write_text(str(number))
        moved = directory.set_aside(directory.index)
        assert moved == directory.quarantine / f"index.{number}"
    assert directory.set_aside(directory.index) is None
    texts = [(directory.quarantine / f"index.{n}" / "data").read_text() for n in range(3)]
    assert texts == ["0", "1", "2"]
    directory.close()


def test_an_index_that_cannot_be_read_is_no_damaged_one(
    machine: Machine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO or a lack of permission: starting empty would throw a sound cache away."""
    _filled(start())
    machine.crash()
    before = _files(_state(machine))

    def refused(_path: str) -> list[str]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("lmdb.verify.verify", refused)
        with pytest.raises(TierFailed, match="cannot read the index"):
            start()
    assert _files(_state(machine)) == before
    assert _quarantine(machine) == []
    assert start().cached(A) == 3


def test_a_log_that_cannot_be_read_is_no_end_of_the_log(
    machine: Machine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _filled(start())
    machine.crash()

    def refused(*_args: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("tierkv_wal.storage.RealStorage.pread", refused)
        with pytest.raises(OSError, match="Input/output error"):
            start()
    assert _quarantine(machine) == []
    assert start().cached(A) == 3


def test_a_rotten_row_of_the_index_is_found(machine: Machine, start: Start) -> None:
    """LMDB's own checks cannot see it."""
    daemon = start()
    _filled(daemon)
    daemon.checkpoint()
    machine.crash()
    _flip_value(_state(machine) / "index")
    daemon = start()
    assert "the checksums of 1 of its entries fail" in daemon.report.rebuilt
    assert daemon.cached(A) == 3


def _flip_value(index: Path) -> None:
    """Change a row's value behind its checksum's back."""
    import lmdb

    with lmdb.open(str(index), max_dbs=5, map_size=8 << 20) as env, env.begin(write=True) as txn:
        blocks = env.open_db(b"blocks", txn=txn)
        key, value = next(iter(txn.cursor(blocks)))
        txn.put(key, value[:10] + bytes([value[10] ^ 1]) + value[11:], db=blocks)


def test_a_second_daemon_finds_the_same_store(machine: Machine, start: Start) -> None:
    daemon = start()
    _filled(daemon)
    store = daemon.directory.read_format()
    identity = daemon.recovered.arenas[Tier.DEVICE].identity
    daemon = start()
    assert daemon.directory.read_format() == store
    assert daemon.recovered.arenas[Tier.DEVICE].identity == identity
    machine.crash()
    Index(_state(machine) / "index", 8 << 20).close()
