"""Records in words: every kind has its fields by name."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.core.decode import decode
from tierkv.core.ids import Tier
from tierkv.core.records import Kind, blank, of_copies, push

HALVES = {"hash_hi": 0x0123, "hash_lo": 0x4567, "extra_hi": 0x89AB, "extra_lo": 0xCDEF}
HASH = f"{0x0123:016x}{0x4567:016x}"
EXTRA = f"{0x89AB:016x}{0xCDEF:016x}"

FIELDS = {
    Kind.LEASE_OPEN: {"lease": 2, "pid": 3, "start_time": 5, "uid": 4},
    Kind.LEASE_CLOSE: {"lease": 2},
    Kind.NAMESPACE: {
        "namespace": 2,
        "digest": "2301000000000000" + "6745000000000000",
        "block_bytes": 3,
        "block_tokens": 4,
    },
    Kind.SEQ_OPEN: {"sequence": 3, "namespace": 2},
    Kind.SEQ_SWAP: {"sequence": 3, "index": 4, "row": 2},
    Kind.SEQ_TRUNCATE: {"sequence": 3, "keep": 4},
    Kind.SEQ_CLOSE: {"sequence": 3},
    Kind.SEQ_SUSPEND: {"sequence": 3},
    Kind.SEQ_RESUME: {"sequence": 3},
    Kind.SEQ_FENCE: {"sequence": 3},
    Kind.ALLOC: {"row": 2, "block": 3, "namespace": 6, "tier": "host", "slot": 4},
    Kind.SEAL: {
        "row": 2,
        "block": 3,
        "hash": HASH,
        "parent": 4,
        "checksum": EXTRA,
        "extra_keys": f"{5:016x}",
        "indexed": True,
    },
    Kind.PLACE: {"row": 2, "block": 3, "tier": "host", "slot": 4, "checksum": EXTRA},
    Kind.DROP: {"row": 2, "block": 3, "tier": "host", "slot": 4},
    Kind.DELETE: {"row": 2, "block": 3},
    Kind.EPOCH: {"epoch": 3},
}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.SEQ_PUSH])
def test_the_fields_of_a_kind(kind: Kind) -> None:
    records = blank(1, kind)
    numbers = {"tier": Tier.HOST, "key": 2, "id": 3, "loc": 4, "gen": 5, "aux": 6}
    for name, value in (numbers | HALVES).items():
        records[name] = value
    assert decode(records[0]) == (kind.name, FIELDS[kind])


def test_pushed_rows_are_listed() -> None:
    rows = np.arange(100, 115, dtype=np.uint32)
    shown = [decode(record) for record in push(7, rows)]
    assert shown[0] == ("SEQ_PUSH", {"sequence": 7, "rows": list(range(100, 112))})
    assert shown[1] == ("SEQ_PUSH", {"sequence": 7, "rows": [112, 113, 114]})


def test_a_tier_that_nobody_knows_is_shown_by_its_number() -> None:
    one = np.ones(1, np.int64)
    record = of_copies(Kind.DROP, 9, one, one.astype(np.uint64), one)[0]
    assert decode(record).fields["tier"] == "tier 9"


@pytest.mark.parametrize(("kind", "name"), [(0, "UNKNOWN"), (127, "UNKNOWN"), (128, "SKIPPED")])
def test_types_that_nobody_knows(kind: int, name: str) -> None:
    records = blank(1, Kind.EPOCH)
    records["type"] = kind
    assert decode(records[0]) == (name, {"type": kind})
