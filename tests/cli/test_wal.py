"""``tierkv wal`` on real stores of killed daemons, sound ones and ones damaged by hand."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash
from tierkv_wal import RealStorage, WalReader

from tests.service.blocks import SPEC, store, tokens
from tests.service.running import ROOT, Daemon, environment, running
from tierkv.cli.main import main
from tierkv.core.prefix import chain_hashes
from tierkv.core.records import blank
from tierkv.service.store import read_format

OK, FAILED, DAMAGE, REPAIRED, NOT_READY, BAD_CONFIG = 0, 1, 4, 5, 75, 78
CHAINS = 150
HEADER = 4096
SLOT = 64
COMMANDS = (["dump"], ["stat"], ["verify"], ["repair"], ["repair", "--yes"])
EVERY_COMMAND = (*(["wal", *one] for one in COMMANDS), ["verify"], ["verify", "--repair"])


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """A dump's JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    def of(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["what"] == what]


class Store:
    """A copy of a killed daemon's store, to be looked at and damaged."""

    def __init__(self, daemon: Daemon, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "state"
        shutil.copytree(daemon.state, self.path)
        self._flags = [
            *daemon.flags,
            *("--set", f"server.state_dir={self.path}"),
            *("--set", f"arena.dir={folder / 'arenas'}"),
        ]
        self._capsys = capsys

    @property
    def segments(self) -> list[Path]:
        return sorted((self.path / "wal").glob("*.wal"))

    def wal(self, *arguments: str) -> Done:
        """Runs ``tierkv wal ARGUMENTS`` on this store."""
        return self.tierkv("wal", *arguments)

    def tierkv(self, *arguments: str) -> Done:
        self._capsys.readouterr()
        code = main([*arguments, *self._flags])
        return Done(code, *self._capsys.readouterr())

    def content(self) -> dict[str, str]:
        """Everything but what locks it."""
        return {
            str(path.relative_to(self.path)): xxhash.xxh3_64_hexdigest(path.read_bytes())
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and path.name not in ("LOCK", "lock.mdb")
        }

    def frames(self) -> list[dict[str, Any]]:
        return self.wal("dump", "--json").of("frame")

    def append(self, *records: Any, synced: bool = True) -> None:
        """Write frames of records to its log, as a daemon would; or all of them between syncs."""
        stored = read_format(self.path)
        assert stored is not None
        reader = WalReader(RealStorage(), str(self.path / "wal"), stored.store_uuid, None)
        for _ in reader.frames():
            pass
        writer = reader.writer(reader.epoch + 1, 65536)
        for part in records:
            writer.append(part.tobytes())
            writer.write()
            if synced:
                writer.sync()
        writer.close()


@pytest.fixture(scope="module")
def killed() -> Iterator[Daemon]:
    """A daemon that synced every reply and was killed: a log of several segments."""
    settings = {
        "wal.durability": "power",
        "wal.segment_bytes": "64KiB",
        "wal.checkpoint_s": "10min",
    }
    with running(settings) as daemon:
        with daemon.connect("for the log") as client:
            ns = client.namespace(SPEC)
            for seed in range(CHAINS):
                store(ns, tokens(2, seed=seed))
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        yield daemon


@pytest.fixture
def sound(killed: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Store:
    return Store(killed, tmp_path, capsys)


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 0x40]), at)


@pytest.fixture
def rotten(sound: Store) -> tuple[Store, dict[str, Any]]:
    """A store with one rotten frame in the middle of its log's first segment, and that frame."""
    first = [frame for frame in sound.frames() if frame["path"] == str(sound.segments[0])]
    frame = first[len(first) // 2]
    flip(sound.segments[0], frame["offset"] + SLOT + 5)
    return sound, frame


# --- a sound log ----------------------------------------------------------------------------------


def test_stat_measures_the_log(sound: Store) -> None:
    found = sound.wal("stat", "--json").json
    kinds = found["records_by_kind"]
    assert kinds["SEAL"] == kinds["ALLOC"] == 2 * CHAINS
    assert kinds["SEQ_OPEN"] == CHAINS
    assert (kinds["NAMESPACE"], kinds["LEASE_OPEN"]) == (1, 2)
    assert sum(kinds.values()) == found["records"]
    assert 1 < found["records_per_frame_mean"] < found["records_per_frame_max"]
    assert found["records"] == pytest.approx(found["frames"] * found["records_per_frame_mean"])
    assert found["unreached_records"] == 0
    assert found["checkpoint_lsn"] == 0
    assert found["end"]["kind"] == "clean"
    assert found["end"]["lsn"] == found["frames"] + found["records"]
    assert found["behind_checkpoint_bytes"] == SLOT * found["end"]["lsn"]
    segments = found["segments"]
    assert [one["file"] for one in segments] == [str(path) for path in sound.segments]
    assert len(segments) >= 3
    assert segments[0]["first_lsn"] == 1
    for before, after in itertools.pairwise(segments):
        assert after["first_lsn"] == before["last_lsn"] + 1
    for one in segments:
        slots = one["last_lsn"] + 1 - one["first_lsn"]
        assert one["used_bytes"] == HEADER + SLOT * slots <= one["allocated_bytes"] == 65536
        assert (one["epoch"], one["fault"]) == (1, "")


def test_stat_in_words(sound: Store) -> None:
    done = sound.wal("stat")
    assert (done.code, done.err) == (OK, "")
    assert sound.segments[0].name in done.out
    assert f"{2 * CHAINS}\n" in done.out
    assert "clean" in done.out


def test_dump_shows_every_record_in_words(sound: Store) -> None:
    done = sound.wal("dump", "--json")
    stat = sound.wal("stat", "--json").json
    assert len(done.of("segment")) == len(stat["segments"])
    assert len(done.of("frame")) == stat["frames"]
    assert done.of("fault") == []
    assert done.lines[-1] == {"what": "end", **stat["end"]}
    numbered = [line["lsn"] for line in done.lines if line["what"] in ("frame", "record")]
    assert numbered == list(range(1, stat["end"]["lsn"] + 1))
    records = done.of("record")
    first_seals = [one["fields"] for one in records if one["kind"] == "SEAL"][:2]
    hashes = chain_hashes(SPEC.digest, tokens(2, seed=0), SPEC.block_tokens)
    assert [seal["hash"] for seal in first_seals] == [one.tobytes().hex() for one in hashes]
    assert first_seals[1]["parent"] == first_seals[0]["block"]
    assert first_seals[0]["indexed"] is True
    (opened,) = (one for one in records if one["kind"] == "NAMESPACE")
    assert opened["fields"]["digest"] == SPEC.digest.hex()
    assert opened["fields"]["block_bytes"] == SPEC.block_bytes
    assert opened["fields"]["block_tokens"] == SPEC.block_tokens
    pushed = [one["fields"]["rows"] for one in records if one["kind"] == "SEQ_PUSH"]
    allocated = [one["fields"]["row"] for one in records if one["kind"] == "ALLOC"]
    assert [row for rows in pushed for row in rows] == allocated
    leases = [one["fields"] for one in records if one["kind"] == "LEASE_OPEN"]
    assert leases[-1]["pid"] == os.getpid()
    assert all("token" not in lease for lease in leases), "a token is a secret"


def test_dump_as_text_has_one_line_for_each(sound: Store) -> None:
    lines = sound.wal("dump").out.splitlines()
    documents = sound.wal("dump", "--json").lines
    assert len(lines) == len(documents)
    for line, document in zip(lines, documents, strict=True):
        if document["what"] == "record":
            assert line.startswith(f"    {document['lsn']} {document['kind']}")
    assert lines[0].startswith(f"segment {sound.segments[0].name}")
    assert lines[-1] == f"the log ends at lsn {documents[-1]['lsn']}, clean"


def test_dump_begins_and_ends_where_it_is_told(sound: Store) -> None:
    frame = [one for one in sound.frames() if one["records"] >= 2][-3]
    done = sound.wal("dump", "--json", "--from-lsn", str(frame["lsn"] + 2), "--limit", "5")
    assert done.of("frame")[0] == frame
    records = done.of("record")
    assert len(records) == 5
    assert records[0]["lsn"] == frame["lsn"] + 2
    assert done.of("end") == []
    behind = sound.wal("dump", "--json", "--from-lsn", "999999")
    assert behind.of("frame") == behind.of("record") == []
    assert behind.of("end")[0]["kind"] == "clean"


def test_a_reader_of_the_dump_may_leave_early(killed: Daemon) -> None:
    command = [sys.executable, "-m", "tierkv", "wal", "dump", "--state-dir", str(killed.state)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("segment ")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait() == OK


def test_verify_and_repair_leave_a_sound_log_alone(sound: Store) -> None:
    before = sound.content()
    verdict = sound.wal("verify", "--json")
    assert verdict.code == OK
    assert verdict.json["findings"] == []
    assert verdict.json["records"] == sound.wal("stat", "--json").json["records"]
    for arguments in (["repair"], ["repair", "--yes"]):
        done = sound.wal(*arguments)
        assert done.code == OK
        assert done.out.startswith("Nothing to repair: the log ends at lsn ")
    assert sound.content() == before


def test_what_may_be_skipped_is_shown_as_skipped(sound: Store) -> None:
    sound.append(unknown(200))
    assert "SKIPPED type=200" in sound.wal("dump").out
    assert sound.wal("stat", "--json").json["records_by_kind"]["type 200"] == 1
    assert sound.wal("verify").code == OK


def test_what_must_not_be_skipped_is_shown_but_no_verdict_is_given(sound: Store) -> None:
    sound.append(unknown(99))
    before = sound.content()
    assert "UNKNOWN type=99" in sound.wal("dump").out
    for arguments in (["wal", "verify"], ["verify"], ["verify", "--repair"]):
        done = sound.tierkv(*arguments)
        assert done.code == BAD_CONFIG
        assert "records of type 99, so it is of a newer tierkv" in done.err
    assert sound.content() == before


def unknown(kind: int) -> Any:
    records = blank(1, 1)  # type: ignore[arg-type]  # the type is replaced
    records["type"] = kind
    return records


# --- damage ---------------------------------------------------------------------------------------


def test_dump_shows_damage_and_goes_on_behind_it(rotten: tuple[Store, dict[str, Any]]) -> None:
    store, frame = rotten
    done = store.wal("dump", "--json")
    assert done.code == OK
    (fault,) = done.of("fault")
    assert fault["path"] == str(store.segments[0])
    assert (fault["offset"], fault["lsn"]) == (frame["offset"], frame["lsn"])
    assert "checksum" in fault["reason"]
    frames = done.of("frame")
    behind = [one for one in frames if one["lsn"] > frame["lsn"]]
    assert behind[0]["lsn"] == frame["last_lsn"] + 1
    assert [one["path"] for one in behind if not one["is_reached"]] == [
        one["path"] for one in behind if one["path"] == fault["path"]
    ]
    assert behind[-1]["path"] == str(store.segments[-1])
    assert done.lines[-1]["kind"] == "corrupt"
    assert done.lines[-1]["lsn"] == frame["lsn"] - 1
    text = store.wal("dump").out
    assert f"  ! {store.segments[0].name} byte {frame['offset']}, lsn {frame['lsn']}: " in text
    assert text.splitlines()[-1].startswith("the log is corrupt behind lsn ")


def test_damage_is_found_and_nothing_is_changed(rotten: tuple[Store, dict[str, Any]]) -> None:
    store, frame = rotten
    before = store.content()
    done = store.wal("verify", "--json")
    assert done.code == DAMAGE
    assert done.json["end"]["kind"] == "corrupt"
    (finding,) = done.json["findings"]
    assert finding.startswith(f"{store.segments[0]} at byte {frame['offset']}: ")
    assert "tierkv wal repair" in store.wal("verify").out
    stat = store.wal("stat", "--json").json
    assert stat["end"]["kind"] == "corrupt"
    assert stat["unreached_records"] > 0
    planned = store.wal("repair", "--json")
    assert planned.code == DAMAGE
    assert planned.json["done"] is None
    plan = planned.json["plan"]
    lost = [one["records"] for one in store.frames() if one["lsn"] > frame["lsn"]]
    kept = [one["records"] for one in store.frames() if one["lsn"] < frame["lsn"]]
    assert (plan["kept_records"], plan["lost_records"]) == (sum(kept), sum(lost))
    assert plan["segments"] == [str(path) for path in store.segments]
    said = store.wal("repair").out
    assert f"lost: {sum(lost):,} intact records" in said
    assert "Nothing was changed; --yes does it." in said
    assert store.content() == before


def test_repair_keeps_what_came_before_the_damage(rotten: tuple[Store, dict[str, Any]]) -> None:
    store, frame = rotten
    names = [path.name for path in store.segments]
    kept = [one for one in store.wal("dump", "--json").of("record") if one["lsn"] < frame["lsn"]]
    done = store.wal("repair", "--yes", "--json")
    assert done.code == REPAIRED
    report = done.json["done"]
    assert (report["records"], report["log_was"]) == (len(kept), "corrupt")
    assert report["leases_closed"] >= 1
    assert sorted(os.listdir(store.path / "quarantine")) == names
    (segment,) = store.segments
    assert segment.name not in names
    assert store.wal("verify").code == OK
    assert store.tierkv("verify").code == OK
    # What was on disk before the damage is a block still.
    on_disk = {
        one["fields"]["block"]
        for one in kept
        if one["kind"] == "PLACE" and one["fields"]["tier"] == "disk"
    }
    assert report["blocks"] == len(on_disk) > 0
    again = store.content()
    assert store.wal("repair", "--yes").code == OK
    assert store.content() == again


def test_a_repair_that_dies_is_begun_again(
    rotten: tuple[Store, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = rotten
    rename = RealStorage.rename
    moved = 0

    def die(self: RealStorage, source: str, target: str) -> None:
        nonlocal moved
        if "/quarantine/" in target:
            moved += 1
            if moved == 2:
                raise OSError(5, "Input/output error", target)
        rename(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(RealStorage, "rename", die)
        done = store.wal("repair", "--yes")
        assert done.code == FAILED
        assert "Input/output error" in done.err
    assert len(os.listdir(store.path / "quarantine")) == 1
    assert store.wal("repair", "--yes").code in (OK, REPAIRED)
    assert store.wal("verify").code == OK
    assert store.tierkv("verify").code == OK


def test_a_torn_tail_is_no_damage(sound: Store) -> None:
    last = sound.frames()[-1]
    flip(Path(last["path"]), last["offset"] + SLOT)
    before = sound.content()
    done = sound.wal("verify")
    assert done.code == OK
    assert "torn tail of a crash" in done.out
    assert sound.wal("verify", "--json").json["end"]["kind"] == "torn"
    dumped = sound.wal("dump", "--json")
    assert [fault["lsn"] for fault in dumped.of("fault")] == [last["lsn"]]
    assert dumped.lines[-1]["kind"] == "torn"
    assert "intact records" not in done.out
    assert sound.wal("repair", "--yes").out.startswith("Nothing to repair")
    assert sound.content() == before


def test_whole_frames_behind_a_torn_tail_are_told(sound: Store) -> None:
    """Nothing was synced there, so it may be power loss; but somebody should know."""
    sound.append(unknown(200), unknown(200), unknown(200), synced=False)
    torn, *behind = sound.frames()[-3:]
    flip(Path(torn["path"]), torn["offset"] + SLOT)
    done = sound.wal("verify")
    records = sum(frame["records"] for frame in behind)
    assert done.code == OK
    assert f"{records} intact records lie behind it" in done.out


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: flip(path, 50), "checksum of the segment header"),
        (lambda path: os.truncate(path, 30_000), "30000|but the next segment begins|shorter"),
        (lambda path: path.write_bytes(b""), "within its header"),
    ],
    ids=["missing", "header", "truncated", "empty"],
)
def test_a_damaged_segment_in_the_middle(
    sound: Store, damage: Callable[[Path], object], reason: str
) -> None:
    first, second, *_, last = sound.segments
    damage(second)
    done = sound.wal("dump", "--json")
    assert done.code == OK
    faults = done.of("fault")
    assert faults
    assert any(re.search(reason, fault["reason"]) for fault in faults)
    paths = {frame["path"] for frame in done.of("frame")}
    assert {str(first), str(last)} <= paths
    assert sound.wal("verify").code == DAMAGE
    assert sound.wal("stat").code == OK
    assert sound.wal("repair", "--yes").code == REPAIRED
    assert sound.wal("verify").code == OK
    assert sound.tierkv("verify").code == OK


@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "lost"])
def test_a_damaged_index_is_said_and_the_log_shown_all_the_same(sound: Store, lost: bool) -> None:
    if lost:
        shutil.rmtree(sound.path / "index")
    else:
        (sound.path / "index" / "data.mdb").write_bytes(b"no index" * 1000)
    stat = sound.wal("stat", "--json")
    assert (stat.code, stat.json["checkpoint_lsn"]) == (OK, None)
    assert stat.json["records_by_kind"]["SEAL"] == 2 * CHAINS
    assert "unknown: the index is damaged or lost" in sound.wal("stat").out
    assert sound.wal("dump").code == OK
    done = sound.wal("verify", "--json")
    assert done.code == DAMAGE
    assert f"the index {sound.path / 'index'}" in done.json["findings"][0]
    before = sound.content()
    refused = sound.wal("repair", "--yes")
    assert refused.code == DAMAGE
    assert "`tierkv verify --repair` makes that anew" in refused.err
    assert sound.content() == before


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", EVERY_COMMAND, ids=" ".join)
def test_a_newer_log_is_refused_and_left_alone(sound: Store, arguments: list[str]) -> None:
    with sound.segments[-1].open("r+b") as file:
        page = bytearray(file.read(HEADER))
        page[8:10] = struct.pack("<H", 2)
        page[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:-8])))
        file.seek(0)
        file.write(page)
    before = sound.content()
    done = sound.tierkv(*arguments)
    assert (done.code, done.out) == (BAD_CONFIG, "")
    assert "the log was written by a newer tierkv: segment format 2.0" in done.err
    assert sound.content() == before


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_store_in_use_is_refused(
    sound: Store, arguments: list[str], tmp_path: Path, killed: Daemon
) -> None:

    with (sound.path / "LOCK").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = sound.wal(*arguments)
    assert (done.code, done.out) == (NOT_READY, "")
    assert f"{sound.path} is in use by another tierkv process; stop it" in done.err


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_where_no_store_is_none_is_made(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["wal", *arguments, "--state-dir", str(tmp_path / "mistyped")]) == FAILED
    assert f"no store is in {tmp_path / 'mistyped'}" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("arguments", [["wal", "repair", "--yes"], ["verify", "--repair"]])
def test_repair_is_for_the_stores_owner(
    rotten: tuple[Store, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    store, _ = rotten
    before = store.content()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    done = store.tierkv(*arguments)
    assert done.code == BAD_CONFIG
    assert "and this is uid 54321: run it as " in done.err
    assert store.content() == before


@pytest.mark.parametrize("name", ["dump", "stat", "verify", "repair"])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wal", name, "--help"]) == OK
    said = capsys.readouterr().out
    assert said.startswith(f"Usage: tierkv wal {name} ")
    assert "--state-dir" in said
    assert "--json" in said
