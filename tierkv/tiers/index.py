"""The checkpoint of all metadata, in LMDB: one transaction holds one checkpoint.

Five databases. Every value ends in xxh3_64 over the database's name, key and value (little-endian
u8), because LMDB has no checksums of its own, and a page that was not written may leave another
database's in its place:

    blocks      chunk u4 (BE)        -> the values of rows 63 * chunk .. 63 * chunk + 62
    sequences   sequence id u8 (BE)  -> bytes
    leases      lease id u8 (BE)     -> bytes
    namespaces  namespace id u8 (BE) -> bytes
    meta        name                 -> "i" and a signed 16-byte integer, or "b" and bytes

A row's value is core.blocks.VALUE (64 bytes), all zeros for a free row. A chunk fills one page of
LMDB, which is what LMDB writes for a changed row anyway: so a commit writes no more than with a key
per row, while a million rows are read, checked and walked by the verifier in a fifth of a second.

Threads: any thread may call any method; calls wait for each other. A commit begins and ends its
transaction within the call, as LMDB binds a transaction to one thread.

Crash: the index holds the last checkpoint whose ``commit`` returned, or the one that was under way
when it died; never a part of one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import NamedTuple

import lmdb
import lmdb.verify
import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.core.arrays import distinct, first_of_runs, take
from tierkv.core.blocks import VALUE
from tierkv.core.ids import I64, U32
from tierkv.errors import CorruptionError, TierFailed, TierFull, require
from tierkv.tiers.linux import sync_directory

_BLOCKS = "blocks"
_META = "meta"
_CHECK_BYTES = 8
_PAGE_BYTES = 4096
_PAGE_HEADER_BYTES = 16
_CHUNK_ROWS = (_PAGE_BYTES - _PAGE_HEADER_BYTES - _CHECK_BYTES) // VALUE.itemsize
_CHUNK_BYTES = _CHUNK_ROWS * VALUE.itemsize
_CHUNK_KEY_BYTES = 4
_NAME_BYTES = 8
_INTEGER_BYTES = 16
_CHUNKS_AT_ONCE = 512  # bounds the time that one stretch of Python holds the GIL
_ENTRY_COST_BYTES = 256  # room in LMDB beside the value with ample slack, for sizing the map

Values = npt.NDArray[np.void]
"""Rows of the index, shape [n], dtype VALUE."""


def _no_rows() -> U32:
    return np.zeros(0, np.uint32)


def _no_values() -> Values:
    return np.zeros(0, VALUE)


@dataclass(slots=True)
class IndexChanges:
    """What differs from the last checkpoint.

    ``rows`` (u32 [n], none twice) get ``values`` (VALUE [n], no ``id`` 0); ``deleted_rows``
    (u32 [m]) go, unless they are also in ``rows``. In the other tables None deletes a key.
    """

    rows: U32 = field(default_factory=_no_rows)
    values: Values = field(default_factory=_no_values)
    deleted_rows: U32 = field(default_factory=_no_rows)
    sequences: Mapping[int, bytes | None] = field(default_factory=dict)
    leases: Mapping[int, bytes | None] = field(default_factory=dict)
    namespaces: Mapping[int, bytes | None] = field(default_factory=dict)
    meta: Mapping[str, int | bytes | None] = field(default_factory=dict)


@dataclass(slots=True)
class IndexContents:
    """The last checkpoint but for its blocks. ``bad`` counts the values that were left out because
    their checksum fails.
    """

    sequences: dict[int, bytes]
    leases: dict[int, bytes]
    namespaces: dict[int, bytes]
    meta: dict[str, int | bytes]
    bad: int = 0


class BlockRows(NamedTuple):
    """Some of the last checkpoint's blocks: ``rows`` (u32 [n], ascending), ``values`` (VALUE [n]).

    ``bad`` counts the chunks of rows that were left out because their checksum fails.
    """

    rows: U32
    values: Values
    bad: int = 0


class Index:
    """The checkpoint store. One open per process and directory."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        """Open or make the index in directory ``path``, with room for ``map_bytes``.

        An existing file is walked first by LMDB's verifier, which never maps it: mapping a
        truncated file would kill the process. Raises CorruptionError if it finds anything,
        TierFailed if the files cannot be read or opened, which says nothing about their content.
        """
        self.path = path
        self._lock = threading.Lock()
        data = path / "data.mdb"
        fresh = not data.exists() or data.stat().st_size == 0
        if not fresh:
            _verify(path, data)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The engine's defaults, spelled out: any other choice loses data on power loss.
            self._env = lmdb.open(
                os.fspath(path),
                map_size=map_bytes,
                subdir=True,
                sync=True,
                metasync=True,
                writemap=False,
                readahead=True,
                max_dbs=5,
                mode=0o600,
                lib_version=0,
            )
            self._env.reader_check()
            self._blocks = self._env.open_db(_BLOCKS.encode())
            self._named = {
                name: self._env.open_db(name.encode())
                for name in ("sequences", "leases", "namespaces")
            }
            self._meta = self._env.open_db(_META.encode())
            if fresh:
                # LMDB syncs its file, but not the directories that name it.
                sync_directory(path)
                sync_directory(path.parent)
        except (lmdb.Error, OSError) as error:
            raise TierFailed(f"cannot open the index {path}: {error}", path=str(path)) from error

    def commit(self, changes: IndexChanges) -> None:
        """Make a checkpoint of the changes, all or nothing, durable on return.

        Grows the map once if it is too small. Raises TierFull if that does not do, TierFailed for
        any other error (LMDB reports a full disk as an I/O error; a chunk may have gone bad since
        it was loaded).
        """
        require(len(changes.rows) == len(changes.values), "one value per row")
        require(bool(changes.values["id"].all()), "id 0 marks a free row")
        with self._lock:
            try:
                try:
                    self._commit(changes)
                except lmdb.MapFullError:
                    self._env.set_mapsize(self.map_bytes * 2 + _estimate(changes))
                    self._commit(changes)
            except lmdb.MapFullError as error:
                raise TierFull(
                    f"the index {self.path} does not fit its map", path=str(self.path)
                ) from error
            except lmdb.Error as error:
                raise TierFailed(
                    f"cannot commit to the index {self.path}: {error}", path=str(self.path)
                ) from error

    def load(self) -> IndexContents:
        """Read the last checkpoint, but for its blocks. Raises TierFailed."""
        with self._reading() as txn:
            named = {name: list(txn.cursor(db)) for name, db in self._named.items()}
            meta = list(txn.cursor(self._meta))
        bad = 0
        tables: dict[str, dict[int, bytes]] = {}
        for name, items in named.items():
            sound = _sound(name, items)
            bad += len(items) - len(sound)
            tables[name] = {int.from_bytes(key, "big"): value for key, value in sound.items()}
        sound_meta = _sound(_META, meta)
        return IndexContents(
            sequences=tables["sequences"],
            leases=tables["leases"],
            namespaces=tables["namespaces"],
            meta={key.decode(): _decode_meta(value) for key, value in sound_meta.items()},
            bad=bad + len(meta) - len(sound_meta),
        )

    def blocks(self) -> Iterator[BlockRows]:
        """Read the blocks of the last checkpoint, rows ascending, some at a time: who puts each
        part away needs no memory for all of them. No commit may come between. Raises TierFailed.
        """
        first = b""
        while True:
            with self._reading() as txn:
                cursor = txn.cursor(self._blocks)
                items = list(islice(cursor, _CHUNKS_AT_ONCE)) if cursor.set_range(first) else []
            if not items:
                break
            yield _block_rows(*map(list, zip(*items, strict=True)))
            first = items[-1][0] + b"\0"
        with self._lock:
            # Maps the file anew: what was read of it counts as this process's memory no more.
            self._env.set_mapsize(self.map_bytes)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction[bytes]]:
        try:
            with self._lock, self._env.begin() as txn:
                yield txn
        except lmdb.Error as error:
            raise TierFailed(
                f"cannot read the index {self.path}: {error}", path=str(self.path)
            ) from error

    @property
    def map_bytes(self) -> int:
        """How big the index may get before its map must grow."""
        return self._env.info()["map_size"]

    def close(self) -> None:
        """Close the index; the last call."""
        with self._lock:
            self._env.close()

    def _commit(self, changes: IndexChanges) -> None:
        tables = {
            "sequences": changes.sequences,
            "leases": changes.leases,
            "namespaces": changes.namespaces,
        }
        with self._env.begin(write=True) as txn:
            self._commit_rows(txn, changes)
            for name, table in tables.items():
                keyed = {key.to_bytes(_NAME_BYTES, "big"): table[key] for key in sorted(table)}
                _apply(txn, name, self._named[name], keyed)
            meta = {name.encode(): value for name, value in changes.meta.items()}
            encoded = {
                key: None if value is None else _encode_meta(value) for key, value in meta.items()
            }
            _apply(txn, _META, self._meta, encoded)

    def _commit_rows(self, txn: lmdb.Transaction[bytes], changes: IndexChanges) -> None:
        """Rewrite the chunks that have changed rows."""
        # In this order: of a row that is in both, the value stays.
        rows = np.concatenate([changes.deleted_rows, changes.rows]).astype(np.int64)
        values = np.zeros(len(rows), VALUE)
        values[len(changes.deleted_rows) :] = changes.values
        order = np.argsort(rows // _CHUNK_ROWS, kind="stable")
        rows, values = rows[order], values[order]
        starts = np.flatnonzero(first_of_runs(rows // _CHUNK_ROWS))
        chunks = rows[starts] // _CHUNK_ROWS
        ends = np.append(starts[1:], len(rows))
        cursor = txn.cursor(self._blocks)
        for at in range(0, len(chunks), _CHUNKS_AT_ONCE):
            part = chunks[at : at + _CHUNKS_AT_ONCE]
            table = self._read_chunks(cursor, part)
            chosen = slice(starts[at], ends[at + len(part) - 1])
            places = np.searchsorted(part, rows[chosen] // _CHUNK_ROWS)
            table[places, rows[chosen] % _CHUNK_ROWS] = values[chosen]
            used = table["id"].any(axis=1)
            for key in _chunk_keys(part[~used]):
                txn.delete(key, db=self._blocks)
            cursor.putmulti(_encode_chunks(part[used], table[used]))

    def _read_chunks(self, cursor: lmdb.Cursor[bytes], chunks: I64) -> Values:
        """The values of chunks (ascending), shape [n, _CHUNK_ROWS]; zeros where there are none."""
        items = cursor.getmulti(_chunk_keys(chunks))
        found, stored, bad = _decode_chunks([key for key, _ in items], [part for _, part in items])
        if bad:
            raise TierFailed(
                f"cannot commit to the index {self.path}: {bad} of its entries have gone bad",
                path=str(self.path),
            )
        table = np.zeros((len(chunks), _CHUNK_ROWS), VALUE)
        table[np.searchsorted(chunks, found)] = stored.reshape(-1, _CHUNK_ROWS)
        return table


def _block_rows(keys: list[bytes], parts: list[bytes]) -> BlockRows:
    """The rows of chunks that are not free."""
    chunks, table, bad = _decode_chunks(keys, parts)
    rows = (chunks[:, np.newaxis] * _CHUNK_ROWS + np.arange(_CHUNK_ROWS)).reshape(-1)
    live = np.flatnonzero(table["id"])
    if len(live) < len(rows):
        rows, table = rows[live], take(table, live)
    return BlockRows(rows.astype(np.uint32), table, bad)


def _verify(path: Path, data: Path) -> None:
    try:
        problems = lmdb.verify.verify(os.fspath(path))  # type: ignore[no-untyped-call]  # lmdb.verify has no annotations
    except lmdb.verify.VerifyError as error:
        problems = [str(error)]
    except OSError as error:
        raise TierFailed(f"cannot read the index {path}: {error}", path=str(path)) from error
    if problems:
        others = f" (and {len(problems) - 1} other faults)" if len(problems) > 1 else ""
        raise CorruptionError(
            f"the index {data} is damaged: {problems[0]}{others}",
            path=str(data),
            offset=0,
        )


def _estimate(changes: IndexChanges) -> int:
    """Bytes of map that the changes can need, generously."""
    small = [changes.sequences, changes.leases, changes.namespaces]
    payload = sum(len(value or b"") for table in small for value in table.values())
    rows = np.concatenate([changes.rows, changes.deleted_rows])
    chunks = len(distinct(rows // _CHUNK_ROWS))
    payload += chunks * _PAGE_BYTES
    return 2 * ((chunks + sum(map(len, small))) * _ENTRY_COST_BYTES + payload)


def _check(name: str, key: bytes, value: bytes) -> bytes:
    covered = name.encode() + key + value
    return xxhash.xxh3_64_intdigest(covered).to_bytes(_CHECK_BYTES, "little")


def _is_sound(name: str, key: bytes, stored: bytes) -> bool:
    return stored[-_CHECK_BYTES:] == _check(name, key, stored[:-_CHECK_BYTES])


def _sound(name: str, items: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Keys and values of the entries whose checks hold."""
    return {key: value[:-_CHECK_BYTES] for key, value in items if _is_sound(name, key, value)}


def _apply(
    txn: lmdb.Transaction[bytes],
    name: str,
    db: lmdb._Database,
    changes: Mapping[bytes, bytes | None],
) -> None:
    for key, value in changes.items():
        if value is None:
            txn.delete(key, db=db)
        else:
            txn.put(key, value + _check(name, key, value), db=db)


def _encode_meta(value: int | bytes) -> bytes:
    if isinstance(value, int):
        return b"i" + value.to_bytes(_INTEGER_BYTES, "little", signed=True)
    return b"b" + value


def _decode_meta(stored: bytes) -> int | bytes:
    if stored[:1] == b"i":
        return int.from_bytes(stored[1:], "little", signed=True)
    return stored[1:]


def _chunk_keys(chunks: I64) -> list[bytes]:
    data = chunks.astype(">u4").tobytes()
    return [data[at : at + _CHUNK_KEY_BYTES] for at in range(0, len(data), _CHUNK_KEY_BYTES)]


def _encode_chunks(chunks: I64, table: Values) -> list[tuple[bytes, bytes]]:
    """Keys and stored values of chunks; ``table`` has shape [n, _CHUNK_ROWS]."""
    data = table.tobytes()
    parts = (data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES))
    keyed = zip(_chunk_keys(chunks), parts, strict=True)
    return [(key, part + _check(_BLOCKS, key, part)) for key, part in keyed]


def _decode_chunks(keys: list[bytes], parts: list[bytes]) -> tuple[I64, Values, int]:
    """Chunk numbers, their rows' values one after the other, and how many bad ones are left out."""
    sound = [
        len(key) == _CHUNK_KEY_BYTES
        and len(part) == _CHUNK_BYTES + _CHECK_BYTES
        and _is_sound(_BLOCKS, key, part)
        for key, part in zip(keys, parts, strict=True)
    ]
    data = b"".join([part[:-_CHECK_BYTES] for part in compress(parts, sound)])
    chunks = np.frombuffer(b"".join(compress(keys, sound)), ">u4").astype(np.int64)
    return chunks, np.frombuffer(data, VALUE), len(keys) - len(chunks)
