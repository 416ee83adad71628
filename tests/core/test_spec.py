"""KVSpec: what is refused, and that no two of them share blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tierkv.core.prefix import extra_digests
from tierkv.core.spec import KVSpec, slot_stride
from tierkv.errors import InvalidArgument

SPEC = KVSpec(model="m", layers=2, kv_heads=3, head_dim=64)
OTHER: dict[str, Any] = {
    "model": "n",
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 32,
    "dtype": "bfloat16",
    "block_tokens": 32,
    "layout": "HND",
    "fingerprint": "f",
    "vocab_size": 7,
    "lora": "l",
    "salt": "s",
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 1,
    "pp_size": 2,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("kv_heads", 65_537),
        ("head_dim", -1),
        ("block_tokens", 0),
        ("dtype", "float12"),
        ("layout", "DNH"),
        ("vocab_size", 2**32),
        ("tp_rank", 1),
        ("pp_size", 0),
        ("layers", "2"),
        ("layers", None),
        ("model", 5),
        ("salt", b"bytes"),
    ],
)
def test_a_spec_that_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"KVSpec.*{field}|KVSpec.*rank"):
        msgspec.structs.replace(SPEC, **{field: value}).check()


@pytest.mark.parametrize("field", KVSpec.__struct_fields__)
def test_every_field_separates(field: str) -> None:
    assert msgspec.structs.replace(SPEC, **{field: OTHER[field]}).digest != SPEC.digest


def test_sizes() -> None:
    SPEC.check()
    assert SPEC.block_bytes == 2 * 2 * 16 * 3 * 64 * 4
    assert slot_stride(SPEC.block_bytes) == SPEC.block_bytes
    assert [slot_stride(size) for size in (1, 64, 65, 4095, 4097)] == [64, 64, 128, 4096, 8192]


def test_extra_keys() -> None:
    none, empty, one, other = extra_digests([None, b"", b"1", b"2"]).tolist()
    assert none == empty == 0
    assert len({none, one, other}) == 3
    with pytest.raises(InvalidArgument, match="an extra key is 0"):
        extra_digests([b"1", 0])
