"""The index: checkpoints come back whole, damage is found, the map grows."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.blocks import VALUE
from tierkv.errors import CorruptionError, TierFailed
from tierkv.tiers.index import BlockRows, Index, IndexChanges

MAP_BYTES = 64 << 20

OpenIndex = Callable[..., Index]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def open_index(path: Path) -> Iterator[OpenIndex]:
    """Opens the test's index, closing the one before; LMDB allows one per process."""
    current: list[Index] = []

    def make(map_bytes: int = MAP_BYTES) -> Index:
        while current:
            current.pop().close()
        current.append(Index(path, map_bytes))
        return current[-1]

    yield make
    for index in current:
        index.close()


def some_values(rows: np.ndarray, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.zeros(len(rows), VALUE)
    for name in ("id", "parent", "hash_hi", "hash_lo", "sum_hi", "sum_lo"):
        values[name] = rng.integers(1, 2**64, len(rows), np.uint64)
    for name in ("slot_device", "slot_host", "slot_disk"):
        values[name] = rng.integers(0, 2**32, len(rows), np.uint32)
    values["namespace"] = rng.integers(0, 2**16, len(rows), np.uint16)
    values["flags"] = rows % 4
    return values


@dataclass
class Everything:
    """A whole checkpoint; ``bad_rows`` counts all that was left out of it."""

    rows: np.ndarray
    values: np.ndarray
    sequences: dict[int, bytes]
    leases: dict[int, bytes]
    namespaces: dict[int, bytes]
    meta: dict[str, int | bytes]
    bad_rows: int


def everything(index: Index) -> Everything:
    contents = index.load()
    parts = [BlockRows(np.zeros(0, np.uint32), np.zeros(0, VALUE)), *index.blocks()]
    rows, values, bad = zip(*parts, strict=True)
    return Everything(
        np.concatenate(rows),
        np.concatenate(values),
        contents.sequences,
        contents.leases,
        contents.namespaces,
        contents.meta,
        sum(bad, contents.bad),
    )


def change(rows: list[int], **kwargs: Any) -> IndexChanges:
    numbers = np.array(rows, np.uint32)
    return IndexChanges(rows=numbers, values=some_values(numbers), **kwargs)


def break_value(path: Path, database: bytes, key: bytes) -> None:
    """Flip a bit inside a stored value, leaving LMDB's own structure sound."""
    with lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=5, lib_version=0) as env:
        db = env.open_db(database)
        with env.begin(write=True) as txn:
            value = bytearray(txn.get(key, db=db) or b"")
            value[1] ^= 4
            txn.put(key, bytes(value), db=db)


def test_a_new_index_is_empty(open_index: OpenIndex) -> None:
    contents = everything(open_index())
    assert contents.rows.tolist() == []
    assert contents.values.dtype == VALUE
    assert (contents.sequences, contents.leases, contents.namespaces) == ({}, {}, {})
    assert contents.meta == {}
    assert contents.bad_rows == 0


def test_a_value_has_the_documented_size() -> None:
    assert VALUE.itemsize == 64


def test_a_checkpoint_comes_back_after_a_restart(open_index: OpenIndex) -> None:
    rows = np.random.default_rng(2).permutation(70_000)[:20_000].astype(np.uint32)
    values = some_values(rows)
    open_index().commit(
        IndexChanges(
            rows=rows,
            values=values,
            sequences={2**63: b"table", 1: b""},
            leases={7: b"lease"},
            namespaces={3: b"spec"},
            meta={"ckpt_lsn": 2**63, "epoch": -1, "store": bytes(16), "empty": b""},
        )
    )
    contents = everything(open_index())
    order = np.argsort(rows)
    np.testing.assert_array_equal(contents.rows, rows[order])
    np.testing.assert_array_equal(contents.values, values[order])
    assert contents.sequences == {2**63: b"table", 1: b""}
    assert contents.leases == {7: b"lease"}
    assert contents.namespaces == {3: b"spec"}
    assert contents.meta == {"ckpt_lsn": 2**63, "epoch": -1, "store": bytes(16), "empty": b""}
    assert contents.bad_rows == 0


def test_later_checkpoints_replace_and_delete(open_index: OpenIndex) -> None:
    index = open_index()
    index.commit(change([1, 2, 3], sequences={1: b"a", 2: b"b"}, meta={"ckpt_lsn": 5, "gone": 1}))
    rows = np.array([2, 9], np.uint32)
    values = some_values(rows, seed=8)
    index.commit(
        IndexChanges(
            rows=rows,
            values=values,
            deleted_rows=np.array([3, 2, 77], np.uint32),
            sequences={1: None, 2: b"c", 5: None},
            meta={"ckpt_lsn": 6, "gone": None},
        )
    )
    contents = everything(index)
    assert contents.rows.tolist() == [1, 2, 9]
    np.testing.assert_array_equal(contents.values[1:], values)
    assert contents.sequences == {2: b"c"}
    assert contents.meta == {"ckpt_lsn": 6}


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 200), st.integers(1, 2**64 - 1), max_size=20),
            st.sets(st.integers(0, 200), max_size=30),
            st.dictionaries(st.integers(0, 5), st.none() | st.binary(max_size=30), max_size=4),
        ),
        max_size=5,
    )
)
def test_checkpoints_agree_with_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, Any, Any]]
) -> None:
    index = Index(tmp_path_factory.mktemp("model") / "index", MAP_BYTES)
    blocks: dict[int, int] = {}
    leases: dict[int, bytes] = {}
    for put, deleted, changed_leases in steps:
        values = np.zeros(len(put), VALUE)
        values["id"] = np.array(list(put.values()), np.uint64)
        index.commit(
            IndexChanges(
                rows=np.array(list(put), np.uint32),
                values=values,
                deleted_rows=np.array(sorted(deleted), np.uint32),
                leases=changed_leases,
            )
        )
        blocks = {row: i for row, i in blocks.items() if row not in deleted} | put
        leases |= changed_leases
        leases = {key: value for key, value in leases.items() if value is not None}
    contents = everything(index)
    index.close()
    assert dict(zip(contents.rows.tolist(), contents.values["id"].tolist(), strict=True)) == blocks
    assert contents.leases == leases


@pytest.mark.parametrize(
    ("database", "key"),
    [
        (b"blocks", (1).to_bytes(4, "big")),
        (b"sequences", (1).to_bytes(8, "big")),
        (b"meta", b"ckpt_lsn"),
    ],
    ids=["blocks", "sequences", "meta"],
)
def test_a_rotten_value_is_left_out_and_counted(
    open_index: OpenIndex, path: Path, database: bytes, key: bytes
) -> None:
    index = open_index()
    index.commit(change([1, 2, 63, 126], sequences={1: b"aaaa"}, meta={"ckpt_lsn": 5}))
    index.close()
    break_value(path, database, key)
    contents = everything(open_index())
    assert contents.bad_rows == 1
    # Rows 63 to 125 share a value.
    assert contents.rows.tolist() == ([1, 2, 126] if database == b"blocks" else [1, 2, 63, 126])
    assert contents.sequences == ({} if database == b"sequences" else {1: b"aaaa"})
    assert contents.meta == ({} if database == b"meta" else {"ckpt_lsn": 5})


def test_values_under_other_rows_are_left_out(open_index: OpenIndex, path: Path) -> None:
    open_index().commit(change([1, 63]))
    open_index().close()
    with lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=5, lib_version=0) as env:
        db = env.open_db(b"blocks")
        with env.begin(write=True) as txn:
            value = txn.get((0).to_bytes(4, "big"), db=db)
            txn.put((1).to_bytes(4, "big"), value, db=db)
    contents = everything(open_index())
    assert (contents.rows.tolist(), contents.bad_rows) == ([1], 1)


def test_a_value_of_a_wrong_length_is_left_out(open_index: OpenIndex, path: Path) -> None:
    open_index().commit(change([1, 63]))
    open_index().close()
    with lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=5, lib_version=0) as env:
        db = env.open_db(b"blocks")
        with env.begin(write=True) as txn:
            txn.put((0).to_bytes(4, "big"), b"short", db=db)
    contents = everything(open_index())
    assert (contents.rows.tolist(), contents.bad_rows) == ([63], 1)


def test_rows_that_went_bad_are_not_made_good_by_their_neighbours(
    open_index: OpenIndex, path: Path
) -> None:
    open_index().commit(change([1, 2]))
    open_index().close()
    break_value(path, b"blocks", (0).to_bytes(4, "big"))
    with pytest.raises(TierFailed, match="gone bad"):
        open_index().commit(change([3]))
    assert everything(open_index()).bad_rows == 1


def test_an_emptied_index_takes_no_room(open_index: OpenIndex, path: Path) -> None:
    index = open_index()
    index.commit(change(list(range(1000))))
    index.commit(IndexChanges(deleted_rows=np.arange(999, dtype=np.uint32)))
    assert everything(index).rows.tolist() == [999]
    index.commit(IndexChanges(deleted_rows=np.array([999], np.uint32)))
    assert everything(index).rows.tolist() == []
    index.close()
    with lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=5, lib_version=0) as env:
        db = env.open_db(b"blocks")
        with env.begin() as txn:
            assert txn.stat(db)["entries"] == 0


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.95])
def test_a_truncated_index_is_found_before_it_is_mapped(
    open_index: OpenIndex, path: Path, kept: float
) -> None:
    index = open_index()
    index.commit(change(list(range(5000))))
    index.close()
    data = path / "data.mdb"
    os.truncate(data, int(data.stat().st_size * kept))
    with pytest.raises(CorruptionError, match="is damaged") as found:
        open_index()
    assert found.value.details["path"] == str(data)


@pytest.mark.parametrize("content", [b"x", b"not an index at all" * 1000])
def test_a_file_that_is_no_index_is_refused(path: Path, content: bytes) -> None:
    path.mkdir()
    (path / "data.mdb").write_bytes(content)
    with pytest.raises(CorruptionError):
        Index(path, MAP_BYTES)


def test_an_empty_file_is_a_new_index(open_index: OpenIndex, path: Path) -> None:
    path.mkdir()
    (path / "data.mdb").touch()
    assert everything(open_index()).rows.tolist() == []


def test_the_map_grows_when_it_is_full(open_index: OpenIndex) -> None:
    index = open_index(map_bytes=256 << 10)
    before = index.map_bytes
    index.commit(change([1], meta={"ckpt_lsn": 1}))
    index.commit(change(list(range(30_000)), sequences={1: bytes(1 << 20)}, meta={"ckpt_lsn": 2}))
    assert index.map_bytes > before
    contents = everything(open_index(map_bytes=256 << 10))
    assert len(contents.rows) == 30_000
    assert contents.sequences == {1: bytes(1 << 20)}
    assert contents.meta == {"ckpt_lsn": 2}


def test_a_full_disk_fails_the_checkpoint_and_keeps_the_last_one(
    mount_tmpfs: Callable[[int], Path],
) -> None:
    index = Index(mount_tmpfs(512 << 10) / "index", MAP_BYTES)
    index.commit(change([1, 2], meta={"ckpt_lsn": 1}))
    with pytest.raises(TierFailed, match="cannot commit to the index"):
        index.commit(change(list(range(50_000)), meta={"ckpt_lsn": 2}))
    assert index.load().meta == {"ckpt_lsn": 1}
    index.commit(change([3], meta={"ckpt_lsn": 3}))
    contents = everything(index)
    assert (contents.rows.tolist(), contents.meta) == ([1, 2, 3], {"ckpt_lsn": 3})
    index.close()


def test_an_index_opens_once_per_process(open_index: OpenIndex, path: Path) -> None:
    open_index()
    with pytest.raises(TierFailed, match="cannot open the index"):
        Index(path, MAP_BYTES)


def test_threads_may_share_an_index(open_index: OpenIndex) -> None:
    index = open_index()
    failures: list[BaseException] = []

    def work(part: int) -> None:
        try:
            for row in range(part, 40, 4):
                index.commit(change([row]))
                assert row in everything(index).rows.tolist()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert everything(index).rows.tolist() == list(range(40))


def commit_for_ever(path: Path, ready: Any) -> None:
    """Checkpoint after checkpoint: all 200 rows and the LSN carry the same number."""
    index = Index(path, MAP_BYTES)
    rows = np.arange(200, dtype=np.uint32)
    lsn = 0
    while True:
        lsn += 1
        values = np.zeros(200, VALUE)
        values["id"] = lsn
        index.commit(IndexChanges(rows=rows, values=values, meta={"ckpt_lsn": lsn}))
        if lsn == 20:
            ready.set()


def test_a_killed_process_leaves_one_whole_checkpoint(open_index: OpenIndex, path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    writer = spawn.Process(target=commit_for_ever, args=(path, ready), daemon=True)
    writer.start()
    assert ready.wait(30)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    contents = everything(open_index())
    lsn = contents.meta["ckpt_lsn"]
    assert isinstance(lsn, int)
    assert lsn >= 20
    assert contents.bad_rows == 0
    assert contents.values["id"].tolist() == [lsn] * 200


# --- damage -------------------------------------------------------------------------------------

DAMAGES = 1200
"""About ten seconds; run with more when the index or LMDB changes."""


def damaged(content: bytes, rng: random.Random) -> bytes:
    """What a bad disk or a bad copy may make of a file: bits, runs of bytes, pages, its length."""
    data = bytearray(content)
    page = 4096
    pages = len(data) // page
    kind = rng.randrange(6)
    if kind == 0:
        # Where LMDB keeps its structure: page headers, node offsets, the two meta pages.
        at = rng.randrange(pages) * page + rng.randrange(64)
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        at = rng.randrange(rng.choice([2 * page, len(data)]))
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        at, size = rng.randrange(len(data)), rng.randrange(1, 600)
        data[at : at + size] = rng.randbytes(len(data[at : at + size]))
    elif kind == 3:
        # A write that went to the wrong place.
        source, target = (rng.randrange(pages) * page for _ in range(2))
        data[target : target + page] = data[source : source + page]
    elif kind == 4:
        # A write that never arrived.
        at = rng.randrange(pages) * page
        data[at : at + page] = bytes(page)
    else:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def open_damaged(folder: Path, content: bytes, sound: list[Any], seed: Any, outcomes: Any) -> None:
    """Open one damaged index after the other, read it, and commit to it."""
    path = folder / "damaged"
    for seed.value in range(DAMAGES):
        rng = random.Random(seed.value)
        path.mkdir(exist_ok=True)
        (path / "lock.mdb").unlink(missing_ok=True)
        (path / "data.mdb").write_bytes(damaged(content, rng))
        try:
            index = Index(path, MAP_BYTES)
        except (CorruptionError, TierFailed):
            outcomes[0] += 1
            continue
        try:
            contents = everything(index)
            if contents.bad_rows:
                outcomes[1] += 1
            else:
                assert plain(contents) in sound, f"seed {seed.value}: wrong content, not found out"
                outcomes[2] += 1
            # The pages of LMDB's list of free pages are read now.
            index.commit(change([7, 2000, 5000], sequences={9: bytes(9000)}))
            everything(index)
        except TierFailed:
            outcomes[1] += 1
        finally:
            index.close()


def plain(contents: Everything) -> tuple[Any, ...]:
    """The contents, for comparison."""
    tables = (contents.sequences, contents.leases, contents.namespaces, contents.meta)
    return (contents.rows.tobytes(), contents.values.tobytes(), *map(repr, tables))


def test_no_damage_kills_the_process_or_shows_a_wrong_value(
    open_index: OpenIndex, path: Path, tmp_path: Path
) -> None:
    """In a child: LMDB maps the file, and would take the whole process with it."""
    index = open_index()
    rng = np.random.default_rng(3)
    sound = []
    for lsn in range(6):
        rows = rng.choice(3000, 800, replace=False).astype(np.uint32)
        index.commit(
            IndexChanges(
                rows=rows,
                values=some_values(rows, seed=lsn),
                deleted_rows=rng.choice(3000, 300, replace=False).astype(np.uint32),
                sequences={lsn + 2: bytes(2000 * lsn), lsn: None},
                leases={lsn: bytes(36)},
                meta={"checkpoint_lsn": lsn},
            )
        )
        sound.append(plain(everything(index)))
    index.close()
    content = (path / "data.mdb").read_bytes()
    spawn = multiprocessing.get_context("spawn")
    seed, outcomes = spawn.Value("q"), spawn.Array("q", 3)
    args = (tmp_path, content, sound, seed, outcomes)
    child = spawn.Process(target=open_damaged, args=args, daemon=True)
    child.start()
    child.join()
    assert child.exitcode == 0, f"seed {seed.value} ended the process: {child.exitcode}"
    refused, left_out, harmless = outcomes
    # Every kind of end was seen; harmless is what hits bytes that nothing uses.
    assert min(refused, left_out, harmless) > DAMAGES // 50
