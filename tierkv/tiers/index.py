"""The checkpoint of all metadata, in LMDB: one transaction holds one checkpoint.

Five databases. Every value ends in xxh3_64 over key and value (little-endian u8), because LMDB has
no checksums of its own:

    blocks      row u4 (big-endian)  -> core.blocks.VALUE (64 bytes)
    sequences   sequence id u8 (BE)  -> bytes
    leases      lease id u8 (BE)     -> bytes
    namespaces  namespace id u8 (BE) -> bytes
    meta        name                 -> "i" and a signed 16-byte integer, or "b" and bytes

Threads: any thread may call any method; calls wait for each other. A commit begins and ends its
transaction within the call, as LMDB binds a transaction to one thread.

Crash: the index holds the last checkpoint whose ``commit`` returned, or the one that was under way
when it died; never a part of one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import lmdb
import lmdb.verify
import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.core.blocks import VALUE
from tierkv.core.ids import U32
from tierkv.errors import CorruptionError, TierFailed, TierFull, require
from tierkv.tiers.linux import sync_directory

_CHECK_BYTES = 8
_STORED_BYTES = VALUE.itemsize + _CHECK_BYTES
_ROW_BYTES = 4
_NAME_BYTES = 8
_INTEGER_BYTES = 16
_ROWS_AT_ONCE = 8192  # bounds the time that one stretch of Python holds the GIL
_ROW_COST_BYTES = 256  # a row's room in LMDB with ample slack, for sizing the map

Values = npt.NDArray[np.void]
"""Rows of the index, shape [n], dtype VALUE."""


def _no_rows() -> U32:
    return np.zeros(0, np.uint32)


def _no_values() -> Values:
    return np.zeros(0, VALUE)


@dataclass(slots=True)
class IndexChanges:
    """What differs from the last checkpoint.

    ``rows`` (u32 [n]) get ``values`` (VALUE [n]); ``deleted_rows`` (u32 [m]) go, unless they
    are also in ``rows``. In the other tables None deletes a key.
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
    """The last checkpoint. ``bad_rows`` counts what was left out because its checksum fails."""

    rows: U32
    values: Values
    sequences: dict[int, bytes]
    leases: dict[int, bytes]
    namespaces: dict[int, bytes]
    meta: dict[str, int | bytes]
    bad_rows: int


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
            path.mkdir(parents=True, exist_ok=True)
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
            self._blocks = self._env.open_db(b"blocks")
            self._named = {
                name: self._env.open_db(name.encode())
                for name in ("sequences", "leases", "namespaces")
            }
            self._meta = self._env.open_db(b"meta")
            if fresh:
                # LMDB syncs its file, but not the directories that name it.
                sync_directory(path)
                sync_directory(path.parent)
        except (lmdb.Error, OSError) as error:
            raise TierFailed(f"cannot open the index {path}: {error}", path=str(path)) from error

    def commit(self, changes: IndexChanges) -> None:
        """Make a checkpoint of the changes, all or nothing, durable on return.

        Grows the map once if it is too small. Raises TierFull if that does not do, TierFailed for
        any other error (LMDB reports a full disk as an I/O error).
        """
        require(len(changes.rows) == len(changes.values), "one value per row")
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
        """Read the last checkpoint. Raises TierFailed."""
        with self._lock:
            try:
                with self._env.begin() as txn:
                    # Two passes, as a million tuples would keep the garbage collector busy.
                    keys = list(txn.cursor(self._blocks).iternext(values=False))
                    parts = list(txn.cursor(self._blocks).iternext(keys=False))
                    named = {name: list(txn.cursor(db)) for name, db in self._named.items()}
                    meta = list(txn.cursor(self._meta))
            except lmdb.Error as error:
                raise TierFailed(
                    f"cannot read the index {self.path}: {error}", path=str(self.path)
                ) from error
        rows, values, bad = _decode_blocks(keys, parts)
        tables: dict[str, dict[int, bytes]] = {}
        for name, items in named.items():
            sound = {key: value[:-_CHECK_BYTES] for key, value in items if _is_sound(key, value)}
            bad += len(items) - len(sound)
            tables[name] = {int.from_bytes(key, "big"): value for key, value in sound.items()}
        sound_meta = {key: value[:-_CHECK_BYTES] for key, value in meta if _is_sound(key, value)}
        return IndexContents(
            rows=rows,
            values=values,
            sequences=tables["sequences"],
            leases=tables["leases"],
            namespaces=tables["namespaces"],
            meta={key.decode(): _decode_meta(value) for key, value in sound_meta.items()},
            bad_rows=bad + len(meta) - len(sound_meta),
        )

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
            for key in _row_keys(np.unique(changes.deleted_rows)):
                txn.delete(key, db=self._blocks)
            cursor = txn.cursor(self._blocks)
            order = np.argsort(changes.rows, kind="stable")
            for start in range(0, len(order), _ROWS_AT_ONCE):
                chosen = order[start : start + _ROWS_AT_ONCE]
                cursor.putmulti(_encode_blocks(changes.rows[chosen], changes.values[chosen]))
            for name, table in tables.items():
                keyed = {key.to_bytes(_NAME_BYTES, "big"): table[key] for key in sorted(table)}
                _apply(txn, self._named[name], keyed)
            meta = {name.encode(): value for name, value in changes.meta.items()}
            encoded = {
                key: None if value is None else _encode_meta(value) for key, value in meta.items()
            }
            _apply(txn, self._meta, encoded)


def _verify(path: Path, data: Path) -> None:
    try:
        problems = lmdb.verify.verify(os.fspath(path))  # type: ignore[no-untyped-call]  # lmdb.verify has no annotations
    except lmdb.verify.VerifyError as error:
        problems = [str(error)]
    except OSError as error:
        raise TierFailed(f"cannot read the index {path}: {error}", path=str(path)) from error
    if problems:
        raise CorruptionError(
            f"the index {data} is damaged ({len(problems)} findings, first: {problems[0]})",
            path=str(data),
            offset=0,
        )


def _estimate(changes: IndexChanges) -> int:
    """Bytes of map that the changes can need, generously."""
    small = [changes.sequences, changes.leases, changes.namespaces]
    payload = sum(len(value or b"") for table in small for value in table.values())
    touched = len(changes.rows) + len(changes.deleted_rows) + sum(map(len, small))
    return 2 * (touched * _ROW_COST_BYTES + payload)


def _check(key: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(key + value).to_bytes(_CHECK_BYTES, "little")


def _is_sound(key: bytes, stored: bytes) -> bool:
    return stored[-_CHECK_BYTES:] == _check(key, stored[:-_CHECK_BYTES])


def _apply(
    txn: lmdb.Transaction[bytes], db: lmdb._Database, changes: Mapping[bytes, bytes | None]
) -> None:
    for key, value in changes.items():
        if value is None:
            txn.delete(key, db=db)
        else:
            txn.put(key, value + _check(key, value), db=db)


def _encode_meta(value: int | bytes) -> bytes:
    if isinstance(value, int):
        return b"i" + value.to_bytes(_INTEGER_BYTES, "little", signed=True)
    return b"b" + value


def _decode_meta(stored: bytes) -> int | bytes:
    if stored[:1] == b"i":
        return int.from_bytes(stored[1:], "little", signed=True)
    return stored[1:]


def _row_keys(rows: U32) -> Iterator[bytes]:
    data = rows.astype(">u4").tobytes()
    return (data[at : at + _ROW_BYTES] for at in range(0, len(data), _ROW_BYTES))


def _row_checks(rows: U32, values: Values) -> npt.NDArray[np.uint64]:
    """xxh3_64 over key and value of each row, shape [n]."""
    size = _ROW_BYTES + VALUE.itemsize
    covered = np.empty((len(rows), size), np.uint8)
    covered[:, :_ROW_BYTES] = rows.astype(">u4").view(np.uint8).reshape(-1, _ROW_BYTES)
    covered[:, _ROW_BYTES:] = values.view(np.uint8).reshape(-1, VALUE.itemsize)
    data = covered.tobytes()
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, len(data), size)
    return np.fromiter((digest(data[at : at + size]) for at in starts), np.uint64, len(rows))


_STORED = np.dtype([("value", VALUE), ("check", "<u8")])


def _encode_blocks(rows: U32, values: Values) -> list[tuple[bytes, bytes]]:
    stored = np.empty(len(rows), _STORED)
    stored["value"] = values
    stored["check"] = _row_checks(rows, np.ascontiguousarray(values))
    data = stored.tobytes()
    parts = (data[at : at + _STORED_BYTES] for at in range(0, len(data), _STORED_BYTES))
    return list(zip(_row_keys(rows), parts, strict=True))


def _decode_blocks(keys: list[bytes], parts: list[bytes]) -> tuple[U32, Values, int]:
    """Rows, values and the number of bad ones left out."""
    count = len(keys)
    sized = [
        len(key) == _ROW_BYTES and len(part) == _STORED_BYTES
        for key, part in zip(keys, parts, strict=True)
    ]
    if not all(sized):
        keys, parts = list(compress(keys, sized)), list(compress(parts, sized))
    rows = np.frombuffer(b"".join(keys), ">u4").astype(np.uint32)
    stored = np.frombuffer(b"".join(parts), _STORED)
    values = np.ascontiguousarray(stored["value"])
    sound = _row_checks(rows, values) == stored["check"]
    return rows[sound], values[sound], count - int(sound.sum())
