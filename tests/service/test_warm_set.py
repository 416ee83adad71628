"""Warm sets: cached blocks that move from one daemon to another, whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import msgspec
import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, check, press, sized, store, tokens
from tests.service.running import Daemon, running
from tierkv.client import aio
from tierkv.client.warm_set import Exported, Imported, Importer, export
from tierkv.client.warm_set_format import SetDecoder, SetEncoder, SetEnd
from tierkv.core.spec import KVSpec
from tierkv.errors import CorruptionError, InvalidArgument, NotFound
from tierkv.rpc.messages import Selector

ACME = msgspec.structs.replace(SPEC, tenant="acme", block_tokens=8)
LONG, BRANCH = (
    tokens(7, seed=1),
    np.concatenate([tokens(7, seed=1)[: 3 * BLOCK], tokens(2, seed=2)]),
)
PICTURE = tokens(2, seed=3)
KEYS = [None, b"an image"]


@pytest.fixture(scope="module")
def source() -> Iterator[Daemon]:
    """Two tenants' blocks, some on disk only, some with extra keys."""
    with running(sized(16, 0, 60)) as daemon:
        with daemon.connect() as client:
            ns, theirs = client.namespace(SPEC), client.namespace(ACME)
            store(ns, LONG)
            store(ns, BRANCH)
            store(ns, PICTURE, KEYS)
            store(theirs, tokens(3, seed=4, block_tokens=8))
            client.flush()
            press(client, client.namespace(msgspec.structs.replace(SPEC, salt="x")), 12, seed=100)
        yield daemon


@pytest.fixture(scope="module")
def whole(source: Daemon) -> bytes:
    """All of it but what pressed."""
    data, counts = asyncio.run(_export(source, Selector(namespace=0)))
    assert (counts.namespaces, counts.blocks, counts.missed) == (1, 11, 0)
    return data


async def _export(daemon: Daemon, selector: Selector) -> tuple[bytes, Exported]:
    counts = Exported()
    async with aio.connect(daemon.socket) as client:
        parts = [part async for part in export(client, selector, counts)]
    return b"".join(parts), counts


async def _import(daemon: Daemon, data: bytes, piece: int = 10_000) -> Imported:
    async with aio.connect(daemon.socket) as client:
        importer = Importer(client, "set")
        for at in range(0, len(data), piece):
            await importer.take(data[at : at + piece])
        await importer.finish()
        return importer.counts


def test_what_one_daemon_has_another_gets(source: Daemon, whole: bytes) -> None:
    theirs, counts = asyncio.run(_export(source, Selector(tenant="acme")))
    assert counts.blocks == 3
    with running(sized(16, 0, 60)) as daemon:
        assert asyncio.run(_import(daemon, whole)) == Imported(1, 11, 0, 0)
        assert asyncio.run(_import(daemon, whole, 1 << 20)) == Imported(1, 0, 11, 0)
        assert asyncio.run(_import(daemon, theirs)) == Imported(1, 3, 0, 0)
        with daemon.connect() as client:
            ns = client.namespace(SPEC)
            for ids, keys in ((LONG, None), (BRANCH, None), (PICTURE, KEYS)):
                with ns.begin(ids, keep=0, extra_keys=keys) as sequence:
                    assert sequence.num_tokens == len(ids)
                    check(ns, sequence, keys)
            assert ns.lookup(PICTURE).tokens == BLOCK
            other = client.namespace(ACME)
            with other.begin(tokens(3, seed=4, block_tokens=8), keep=0) as sequence:
                check(other, sequence)


def test_by_hash_it_is_a_chain_and_what_follows(source: Daemon) -> None:
    name = SetDecoder("x")
    data, counts = asyncio.run(_export(source, Selector(hash=_hash(BRANCH, 3))))
    assert counts.blocks == 5
    found = [one for one in name.feed(data) if not isinstance(one, KVSpec | SetEnd)]
    assert [one.hash.hex() for one in found] == [_hash(BRANCH, n) for n in range(5)]


def _hash(ids: np.ndarray, block: int) -> str:
    from tierkv.core.prefix import chain_hashes

    return chain_hashes(SPEC.digest, ids, BLOCK)[block].tobytes().hex()


def test_nothing_to_be_had(source: Daemon) -> None:
    with pytest.raises(NotFound, match="no such namespace"):
        asyncio.run(_export(source, Selector(tenant="nobody")))


def test_it_keeps_what_fits(whole: bytes) -> None:
    with running(sized(16, 0, 9)) as daemon:
        counts = asyncio.run(_import(daemon, whole))
        assert counts.blocks + counts.left == 11
        assert 0 < counts.blocks <= 9
        with daemon.connect() as client:
            tiers = client.stat()["namespaces"][0]["tiers"]
            assert tiers["device"]["blocks"] == counts.blocks
            assert client.stat()["evictions"] == {}


def decoded(data: bytes) -> list[object]:
    decoder = SetDecoder("set")
    found = list(decoder.feed(data))
    decoder.finish()
    return found


def test_any_byte_that_flips_is_found(whole: bytes) -> None:
    """And what comes before it is what was written."""
    random = Random(5)
    for at in [
        *range(64),
        *random.sample(range(len(whole)), 150),
        *range(len(whole) - 48, len(whole)),
    ]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << random.randrange(8)
        with pytest.raises((CorruptionError, InvalidArgument)) as error:
            decoded(bytes(damaged))
        if isinstance(error.value, CorruptionError):
            assert error.value.details["offset"] <= at
            assert f"byte {error.value.details['offset']}" in str(error.value)


def test_a_set_that_is_cut_off(whole: bytes) -> None:
    random = Random(6)
    for size in [0, 1, 31, 32, *random.sample(range(len(whole)), 50), len(whole) - 1]:
        with pytest.raises(CorruptionError, match=f"the file ends at byte {size}, "):
            decoded(whole[:size])
    with pytest.raises(CorruptionError, match=r"bytes follow its end|here is no frame"):
        decoded(whole + b"more and more of it, for ever and ever")


def test_damage_ends_an_import_and_what_was_whole_stays(whole: bytes) -> None:
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    with running(sized(16, 0, 60)) as daemon:
        with pytest.raises(CorruptionError, match=r"set is damaged at byte \d+"):
            asyncio.run(_import(daemon, bytes(damaged)))
        with daemon.connect() as client:
            ns = client.namespace(SPEC)
            found = ns.lookup(LONG).tokens
            assert 0 < found < len(LONG)
            with ns.begin(LONG, keep=0) as sequence:
                check(ns, sequence)
        assert asyncio.run(_import(daemon, whole)).left == 0


def test_a_frame_stands_where_it_was_written(whole: bytes) -> None:
    """Two sets cannot be spliced into one that looks sound."""
    encoder = SetEncoder()
    head = encoder.header() + encoder.namespace(SPEC)
    at = len(encoder.header())
    assert head[:at] == whole[:at]
    with pytest.raises(CorruptionError, match=r"checksum fails|is no frame"):
        decoded(whole[:at] + whole[at + 5 :])


@pytest.mark.parametrize(
    "said",
    [b"", b"[]", b"{}", b"\xff", b'{"model": "\xff"}', b"[" * 100_000, b'{"model": 1e999}']
    + [msgspec.json.encode({**msgspec.structs.asdict(SPEC), **one}) for one in (
        {"block_tokens": 2**62}, {"layers": -1}, {"head_dim": 65_536, "layers": 65_536}, {"x": 1},
    )],
)  # fmt: skip
def test_a_namespace_that_cannot_be(said: bytes) -> None:
    encoder = SetEncoder()
    data = encoder.header() + encoder._frame(b"N", said)
    with pytest.raises(InvalidArgument, match="byte 32: a namespace that this tierkv does not"):
        decoded(data)


def test_what_is_no_warm_set() -> None:
    with pytest.raises(InvalidArgument, match="is no warm set"):
        decoded(b"a" * 100)
    newer = bytearray(SetEncoder().header())
    newer[8] = 9
    with pytest.raises(CorruptionError):
        decoded(bytes(newer))
