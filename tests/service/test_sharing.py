"""Who shares blocks: only sequences with the same tokens, extra keys and namespace."""

from __future__ import annotations

import msgspec
import pytest

from tests.service.blocks import BLOCK, SPEC, check, fill, store, tokens
from tests.service.running import Daemon

STRANGERS = {
    "salt": "tenant-2",
    "lora": "adapter",
    "fingerprint": "other weights",
    "model": "n",
    "dtype": "float16",
    "layout": "HND",
    "tp_size": 2,
    "pp_size": 2,
    "vocab_size": 60_000,
}


@pytest.mark.parametrize("field", STRANGERS)
def test_the_same_tokens_in_another_namespace_are_not_shared(client, ns, field: str) -> None:
    ids = tokens(3, seed=200)
    store(ns, ids)
    spec = msgspec.structs.replace(SPEC, **{field: STRANGERS[field]})
    other = client.namespace(spec)
    assert other.lookup(ids).tokens == 0
    store(other, ids)
    with fill(other, ids) as sequence, fill(ns, ids) as own:
        assert sequence.cached_tokens == own.cached_tokens == 3 * BLOCK
        check(other, sequence)
        check(ns, own)


def test_extra_keys_separate_blocks_from_the_first_one_that_has_them(ns) -> None:
    ids = tokens(4, seed=210)
    picture, other = [None, b"picture 1"], [None, b"picture 2"]
    store(ns, ids)
    assert ns.lookup(ids, extra_keys=picture).tokens == BLOCK
    store(ns, ids, picture)
    assert ns.lookup(ids, extra_keys=picture).tokens == 4 * BLOCK
    assert ns.lookup(ids, extra_keys=other).tokens == BLOCK
    store(ns, ids, other)
    for keys in (None, picture, other, [None, None], [b""]):
        with fill(ns, ids, keys) as sequence:
            assert sequence.cached_tokens == 4 * BLOCK
            check(ns, sequence, keys)


def test_workers_share_what_is_the_same(daemon: Daemon, ns) -> None:
    ids = tokens(4, seed=220)
    with fill(ns, ids) as first, daemon.connect() as client:
        other = client.namespace(SPEC)
        with fill(other, ids) as second:
            assert second.cached_tokens == 4 * BLOCK
            assert second.block_table.tolist() == first.block_table.tolist()


def test_blocks_computed_twice_are_kept_once(daemon: Daemon, client, ns) -> None:
    """Two workers that compute the same tokens at the same time end up with the same blocks."""
    ids = tokens(4, seed=230)
    before = client.stat()["blocks"]
    with ns.begin(ids, keep=0) as slow:
        slow.reserve(len(ids))
        with daemon.connect() as client_2, fill(client_2.namespace(SPEC), ids) as fast:
            ns.pool[slow.block_table, : SPEC.block_bytes] = client_2.namespace(SPEC).pool[
                fast.block_table, : SPEC.block_bytes
            ]
            slow.append(ids)
            assert slow.block_table.tolist() == fast.block_table.tolist()
            assert client.stat()["blocks"] == before + 4


def test_a_fork_shares_until_one_writes(ns) -> None:
    ids = tokens(2, seed=240)
    with fill(ns, ids) as parent:
        parent.reserve(4)
        ns.pool[parent.block_table[2], : SPEC.block_bytes] = 5
        parent.append([1, 2, 3])
        with parent.fork() as child:
            assert child.block_table.tolist() == parent.block_table.tolist()
            child.reserve(1)
            assert child.block_table[:2].tolist() == parent.block_table[:2].tolist()
            assert child.block_table[2] != parent.block_table[2]
            copied = ns.pool[child.block_table[2], : SPEC.block_bytes]
            assert (copied == 5).all()
            copied[:] = 6
            assert (ns.pool[parent.block_table[2], : SPEC.block_bytes] == 5).all()
            check(ns, child, blocks=2)
