"""KVSpec: what is refused, and that no two of them share blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import xxhash

from tierkv.core.prefix import extra_digests
from tierkv.core.spec import BLOCK_BYTES_MAX, KVSpec, slot_stride
from tierkv.errors import InvalidArgument

SPEC = KVSpec(model="m", layers=2, kv_heads=3, head_dim=64)
PACKED = KVSpec(model="m", packing="engine-1", packed_bytes=1000)
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
    "tenant": "t",
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 1,
    "pp_size": 2,
    "packing": "engine-2",
    "packed_bytes": 1001,
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
        ("tenant", "a" * 129),
        ("tenant", "two\nlines"),
        ("packed_bytes", 1000),
        ("packing", 1),
    ],
)
def test_a_spec_that_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"KVSpec.*{field}|KVSpec.*rank"):
        msgspec.structs.replace(SPEC, **{field: value}).check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("packed_bytes", 0),
        ("packed_bytes", -1),
        ("packed_bytes", BLOCK_BYTES_MAX + 1),
        ("packed_bytes", 1.5),
        ("block_tokens", 0),
        ("layers", -1),
    ],
)
def test_a_packed_spec_that_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"KVSpec.*{field}"):
        msgspec.structs.replace(PACKED, **{field: value}).check()


def test_a_block_has_a_greatest_size() -> None:
    with pytest.raises(InvalidArgument, match=r"KVSpec.block_bytes is 4294967296"):
        KVSpec(model="m", layers=1024, kv_heads=1024, head_dim=32).check()


@pytest.mark.parametrize("field", KVSpec.__struct_fields__)
def test_every_field_separates(field: str) -> None:
    spec = PACKED if field == "packed_bytes" else SPEC
    assert msgspec.structs.replace(spec, **{field: OTHER[field]}).digest != spec.digest


def test_the_digest_of_plain_blocks_says_nothing_of_packing() -> None:
    """So it is the one that workers computed before there was any."""
    fields = (
        '{"block_tokens":16,"dtype":"float32","fingerprint":"","head_dim":64,"kv_heads":3,'
        '"layers":2,"layout":"NHD","lora":"","model":"m","pp_rank":0,"pp_size":1,"salt":"",'
        '"tp_rank":0,"tp_size":1,"vocab_size":0}'
    )
    assert SPEC.digest == xxhash.xxh3_128_digest(fields.encode())


def test_a_spec_without_a_tenant_is_what_it_was_before_there_were_any() -> None:
    assert b"tenant" not in msgspec.json.encode(SPEC)
    owned = msgspec.structs.replace(SPEC, tenant="acme")
    owned.check()
    assert msgspec.json.decode(msgspec.json.encode(owned), type=KVSpec) == owned


def test_packed_blocks_have_a_size_and_nothing_else() -> None:
    PACKED.check()
    msgspec.structs.replace(PACKED, packed_bytes=BLOCK_BYTES_MAX, dtype="fp8_e5m2").check()
    assert PACKED.block_bytes == 1000
    with pytest.raises(InvalidArgument, match="packed as 'engine-1'"):
        _ = PACKED.token_bytes


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
