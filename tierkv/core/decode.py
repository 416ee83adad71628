"""Records in words: what the fields of each kind are called, for tools that show a log."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tierkv.core.ids import Tier
from tierkv.core.records import SKIPPED_FROM, Kind, Records, pushed_rows

Field = int | str | bool | list[int]


class Decoded(NamedTuple):
    """One record: the name of its kind, and its fields by name. Hashes and checksums are hex."""

    kind: str
    fields: dict[str, Field]


def decode(record: np.void) -> Decoded:
    """Put one record (dtype RECORD) into words.

    A lease's token is left out: who knows it can take the lease over.
    """
    kind = int(record["type"])
    try:
        known = Kind(kind)
    except ValueError:
        can_skip = kind >= SKIPPED_FROM
        return Decoded("SKIPPED" if can_skip else "UNKNOWN", {"type": kind})
    return Decoded(known.name, _fields(known, record))


def _fields(kind: Kind, record: np.void) -> dict[str, Field]:
    of = {name: int(record[name]) for name in ("aux", "key", "id", "loc", "gen")}
    copy: dict[str, Field] = {"tier": _tier(int(record["tier"])), "slot": of["loc"]}
    block: dict[str, Field] = {"row": of["key"], "block": of["id"]}
    match kind:
        case Kind.LEASE_OPEN:
            worker = {"pid": of["id"], "start_time": of["gen"], "uid": of["loc"]}
            return {"lease": of["key"], **worker}
        case Kind.LEASE_CLOSE:
            return {"lease": of["key"]}
        case Kind.NAMESPACE:
            sizes = {"block_bytes": of["id"], "block_tokens": of["loc"]}
            # A digest's bytes lie here as they are; of hashes the two halves are numbers.
            digest = record["hash_hi"].tobytes() + record["hash_lo"].tobytes()
            return {"namespace": of["key"], "digest": digest.hex(), **sizes}
        case Kind.SEQ_OPEN:
            return {"sequence": of["id"], "namespace": of["key"]}
        case Kind.SEQ_PUSH:
            return {"sequence": of["id"], "rows": _pushed(record)}
        case Kind.SEQ_SWAP:
            return {"sequence": of["id"], "index": of["loc"], "row": of["key"]}
        case Kind.SEQ_TRUNCATE:
            return {"sequence": of["id"], "keep": of["loc"]}
        case Kind.SEQ_CLOSE | Kind.SEQ_SUSPEND | Kind.SEQ_RESUME | Kind.SEQ_FENCE:
            return {"sequence": of["id"]}
        case Kind.ALLOC:
            return {**block, "namespace": of["aux"], **copy}
        case Kind.SEAL:
            return {
                **block,
                "hash": _hex(record, "hash"),
                "parent": of["loc"],
                "checksum": _hex(record, "extra"),
                "extra_keys": f"{of['gen']:016x}",
                "indexed": bool(record["tier"]),
            }
        case Kind.PLACE:
            return {**block, **copy, "checksum": _hex(record, "extra")}
        case Kind.DROP:
            return {**block, **copy}
        case Kind.DELETE:
            return block
        case Kind.EPOCH:
            return {"epoch": of["id"]}


def _hex(record: np.void, name: str) -> str:
    return f"{int(record[f'{name}_hi']):016x}{int(record[f'{name}_lo']):016x}"


def _tier(number: int) -> str:
    return Tier(number).label if number in set(Tier) else f"tier {number}"


def _pushed(record: np.void) -> list[int]:
    records: Records = np.frombuffer(record.tobytes(), record.dtype)
    rows: list[int] = pushed_rows(records).tolist()
    return rows
