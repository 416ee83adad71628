"""What operators see of blocks and change about them, through a real daemon."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, check, fill, press, sized, store, tokens
from tests.service.raw import Peer
from tests.service.running import Daemon, running, until
from tierkv.core.prefix import chain_hashes
from tierkv.errors import InvalidArgument, LimitExceeded, NotFound
from tierkv.rpc import messages as m

ACME = msgspec.structs.replace(SPEC, tenant="acme")
SMALL = sized(16, 0, 40)


@pytest.fixture
def small() -> Iterator[Daemon]:
    """16 blocks in the device tier, 40 on disk."""
    with running(SMALL) as daemon:
        yield daemon


def names(ids: np.ndarray, spec=SPEC) -> list[str]:
    hashes = chain_hashes(spec.digest, ids, spec.block_tokens)
    return [one.tobytes().hex() for one in hashes]


def listed(client, kind: str, **selector) -> list[dict]:
    """All pages."""
    items, after = [], 0
    while True:
        page = client.operate(m.List(kind, m.Selector(**selector), after, 3), m.Listed)
        items += page.items
        after = page.next
        if not after:
            return items


def pin(client, *, undo: bool = False, **selector) -> m.Pinned:
    return client.operate(m.Pin(m.Selector(**selector), undo), m.Pinned)


def delete(client, *, really: bool = True, **selector) -> m.Deleted:
    return client.operate(m.Delete(m.Selector(**selector), really), m.Deleted)


def warm(client, **selector) -> m.Warmed:
    return client.operate(m.Warm(m.Selector(**selector)), m.Warmed)


def restart(daemon: Daemon) -> None:
    """kill -9, and again."""
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    daemon.start()


def lose_the_index(daemon: Daemon) -> None:
    """kill -9, and the index is gone when it starts again."""
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    for path in daemon.state.joinpath("index").glob("*.mdb"):
        path.unlink()
    daemon.start()


# --- looking --------------------------------------------------------------------------------------


def test_what_there_is_to_see(small: Daemon) -> None:
    long, short = tokens(5, seed=1), tokens(5, seed=1)[: 2 * BLOCK]
    branch = np.concatenate([short, tokens(1, seed=2)])
    with small.connect("looker") as client:
        ns, theirs = client.namespace(SPEC), client.namespace(ACME)
        store(ns, long)
        store(theirs, tokens(1, seed=3))
        held = fill(ns, branch)
        held.reserve(1)

        chains = listed(client, "chains")
        assert [one["hash"] for one in chains] == [
            names(long)[-1], names(branch)[-1], names(tokens(1, seed=3), ACME)[-1],
        ]  # fmt: skip
        assert [one["blocks"] for one in chains] == [5, 3, 1]
        assert [one["tenant"] for one in chains] == ["", "", "acme"]
        assert [one["references"] for one in chains] == [0, 1, 0]
        assert chains[0]["tokens"] == 5 * BLOCK
        assert chains[0]["first"] == chains[1]["first"] == names(long)[0]
        assert chains[0]["tiers"]["device"] == 5

        blocks = listed(client, "blocks")
        assert len(blocks) == 5 + 1 + 1 + 1
        assert sorted(one["hash"] for one in blocks if one["hash"]) == sorted(
            {*names(long), *names(branch), *names(tokens(1, seed=3), ACME)}
        )
        assert [one["state"] for one in blocks].count("open") == 1
        assert {one["tenant"] for one in listed(client, "blocks", tenant="acme")} == {"acme"}
        below = listed(client, "blocks", hash=names(long)[1])
        assert {one["hash"] for one in below} == {*names(long)[1:], names(branch)[2]}

        (sequence,) = listed(client, "sequences")
        assert sequence["lease"] == client.lease
        assert (sequence["blocks"], sequence["sealed"], sequence["state"]) == (4, 3, "active")
        (lease,) = listed(client, "leases")
        assert (lease["lease"], lease["worker"], lease["sequences"]) == (
            client.lease, "looker", 1,
        )  # fmt: skip


KEYS = {
    "blocks": "hash id namespace tenant state tiers bytes references mapped pinned",
    "chains": "hash first namespace tenant blocks tokens bytes tiers references pinned",
    "sequences": "sequence lease namespace tenant state blocks sealed bytes",
    "leases": "lease pid uid worker connected sequences blocks",
    "pins": "hash namespace tenant blocks tokens bytes",
}
"""Scripts rely on them: they may be added, never renamed."""


def test_the_keys_of_what_is_listed(small: Daemon) -> None:
    ids = tokens(1, seed=1)
    with small.connect() as client:
        with fill(client.namespace(SPEC), ids):
            pin(client, hash=names(ids)[0])
            for kind, keys in KEYS.items():
                assert list(listed(client, kind)[0]) == keys.split(), kind
        block = client.operate(m.Inspect("block", hash=names(ids)[0]), m.Inspected).document
        assert list(block) == [
            *KEYS["blocks"].split(), "depth", "chain", "children", "child_count", "following",
            "checksum", "holders", "tokens", "extra_keys",
        ]  # fmt: skip
        namespace = client.operate(m.Inspect("namespace", 0), m.Inspected).document
        assert list(namespace) == [
            "namespace", "tenant", "digest", "block_tokens", "block_bytes", "spec",
        ]  # fmt: skip


def test_one_block_inspected(small: Daemon) -> None:
    ids, branch = tokens(3, seed=1), np.concatenate([tokens(3, seed=1)[:BLOCK], tokens(2, seed=2)])
    with small.connect("looker") as client:
        ns = client.namespace(SPEC)
        store(ns, ids)
        store(ns, branch)
        client.flush()
        press(client, ns, 16, seed=100)  # so that the chain is only on disk
        with fill(ns, tokens(1, seed=4)):
            pass
        found = client.operate(m.Inspect("block", hash=names(ids)[0][:8]), m.Inspected).document
        assert found["hash"] == names(ids)[0]
        assert found["tokens"] == ids[:BLOCK].tolist()
        assert (found["depth"], found["child_count"], found["following"]) == (0, 2, 4)
        assert set(found["children"]) == {names(ids)[1], names(branch)[1]}
        assert found["tiers"] == ["disk"]
        assert found["holders"] == []
        with fill(ns, ids) as sequence:
            found = client.operate(m.Inspect("block", hash=names(ids)[2]), m.Inspected).document
            assert found["chain"] == names(ids)
            assert found["tokens"] == ids[2 * BLOCK :].tolist()
            (holder,) = found["holders"]
            assert (holder["lease"], holder["worker"]) == (client.lease, "looker")
            assert sequence.num_tokens == len(ids)
            table = client.operate(m.Inspect("sequence", holder["sequence"]), m.Inspected).document[
                "table"
            ]
            assert [one["hash"] for one in table] == names(ids)


def test_what_is_not_there(small: Daemon) -> None:
    with small.connect() as client:
        store(client.namespace(SPEC), tokens(1, seed=1))
        for request in (
            m.Inspect("block", hash="0123456789"),
            m.Inspect("sequence", 77),
            m.List("chains", m.Selector(namespace=4)),
            m.List("chains", m.Selector(tenant="nobody")),
        ):
            with pytest.raises(NotFound, match=r"there is no|no cached block|no tenant"):
                client.operate(request, m.Message)
        for request in (
            m.List("chains", m.Selector(hash="xyz")),
            m.List("cats", m.Selector()),
            m.List("chains", m.Selector(), limit=0),
            m.List("chains", m.Selector(), limit=2**63),
            m.Delete(m.Selector(), really=True),
            m.Pin(m.Selector()),
        ):
            with pytest.raises(InvalidArgument):
                client.operate(request, m.Message)


@pytest.mark.parametrize("after", [2**63 - 1, 2**63, 2**64 - 1])
def test_a_page_far_behind_the_last_one_is_empty(small: Daemon, after: int) -> None:
    """Whatever a worker asks for: it must not end the daemon."""
    with small.connect() as client:
        store(client.namespace(SPEC), tokens(1, seed=1))
        for kind in ("blocks", "chains", "sequences", "leases", "pins"):
            assert client.operate(m.List(kind, m.Selector(), after), m.Listed).items == []
        assert not client.operate(m.Contents(m.Selector(), after), m.Content).tokens


# --- pins -----------------------------------------------------------------------------------------


def test_a_pinned_chain_outlives_everything_that_comes_after(small: Daemon) -> None:
    ids = tokens(4, seed=1)
    with small.connect() as client:
        ns = client.namespace(SPEC)
        store(ns, ids)
        pinned = pin(client, hash=names(ids)[2])
        assert (pinned.pins, pinned.blocks, pinned.change) == (1, 3, 3)
        assert pin(client, hash=names(ids)[2]).pins == 0
        press(client, ns, 60, seed=100)
        assert ns.lookup(ids).tokens == 3 * BLOCK
    restart(small)
    with small.connect() as client:
        ns = client.namespace(SPEC)
        press(client, ns, 60, seed=200)
        assert ns.lookup(ids).tokens == 3 * BLOCK
        with ns.begin(ids) as sequence:
            check(ns, sequence)
        (one,) = listed(client, "pins")
        assert (one["hash"], one["blocks"]) == (names(ids)[2], 3)
        assert listed(client, "sequences") == []
        assert all(one["pid"] for one in listed(client, "leases"))
        status = client.stat()
        assert (status["pins"], status["sequences"]) == (1, 0)
        assert pin(client, undo=True, hash=names(ids)[2][:6]).blocks == 0
        drive_out(client, ns, ids)


def test_pins_by_tenant_and_how_much_they_may_hold(small: Daemon) -> None:
    with small.connect() as client:
        ns, theirs = client.namespace(SPEC), client.namespace(ACME)
        store(theirs, tokens(3, seed=1))
        store(theirs, tokens(2, seed=2))
        for seed in range(10, 15):
            store(ns, tokens(5, seed=seed))
        pinned = pin(client, tenant="acme")
        assert (pinned.pins, pinned.blocks) == (2, 5)
        with pytest.raises(LimitExceeded, match=r"50% of it: unpin others, or raise disk.bytes"):
            pin(client, namespace=ns_number(client, ""))
        assert len(listed(client, "pins")) == 2
        assert pin(client, undo=True, tenant="acme").pins == 2


def drive_out(client, ns, ids: np.ndarray) -> None:
    """Cache other blocks until none of these is left."""
    seed = 1000
    while ns.lookup(ids).tokens:
        press(client, ns, 16, seed)
        seed += 16


def ns_number(client, tenant: str) -> int:
    return next(one["id"] for one in client.stat()["namespaces"] if one["tenant"] == tenant)


def test_nobody_takes_up_the_lease_of_the_pins(small: Daemon) -> None:
    with small.connect() as client:
        store(client.namespace(SPEC), tokens(1, seed=1))
        pin(client, hash=names(tokens(1, seed=1))[0])
        with Peer(small) as peer:
            hello = m.Hello(m.PROTOCOL_VERSION, "thief", b"tierkv operators")
            assert not peer.want(hello, m.Welcome).resumed
        assert [one["blocks"] for one in listed(client, "pins")] == [1]


# --- deleting -------------------------------------------------------------------------------------


def test_a_deleted_prefix_is_found_by_nobody(small: Daemon) -> None:
    ids, other = tokens(4, seed=1), np.concatenate([tokens(4, seed=1)[:BLOCK], tokens(2, seed=2)])
    with small.connect() as client, small.connect() as holder:
        ns, theirs = client.namespace(SPEC), holder.namespace(SPEC)
        store(ns, ids)
        store(ns, other)
        out = np.zeros((4, SPEC.block_bytes), np.uint8)
        assert theirs.read(ids, out) == 4
        sequence = fill(theirs, ids)
        plan = delete(client, really=False, hash=names(ids)[1])
        assert (plan.blocks, plan.in_use, plan.done) == (3, 3, False)
        assert plan.bytes["device"] == 3 * SPEC.block_bytes
        assert ns.lookup(ids).tokens == len(ids)

        done = delete(client, hash=names(ids)[1])
        assert (done.blocks, done.in_use, done.done) == (3, 3, True)
        assert ns.lookup(ids).tokens == BLOCK
        assert ns.lookup(other).tokens == len(other)
        assert ns.read(ids, out) == 1
        assert set(ns.exists(np.frombuffer(bytes.fromhex(names(ids)[2]), np.uint8)[None])) == {255}
        check(theirs, sequence)
        sequence.reserve(BLOCK)
        sequence.end()
        store(ns, ids)  # again, as if it had never been there
        assert ns.lookup(ids).tokens == len(ids)


def evict_all(client, ns) -> None:
    """Make room for as much as fits, and give it back unused."""
    with ns.begin(tokens(1, seed=9), keep=0, reserve=0) as sequence:
        sequence.reserve(14 * BLOCK)


@pytest.mark.parametrize("come_back", [restart, lose_the_index])
def test_it_does_not_come_back(small: Daemon, come_back) -> None:
    ids, evicted, kept = tokens(4, seed=1), tokens(4, seed=2), tokens(4, seed=3)
    with small.connect() as client:
        ns, theirs = client.namespace(SPEC), client.namespace(ACME)
        store(theirs, tokens(2, seed=4))
        for one in (ids, evicted, kept):
            store(ns, one)
        client.flush()
        assert delete(client, hash=names(ids)[1]).blocks == 3
        assert delete(client, tenant="acme").blocks == 2
        store(theirs, tokens(2, seed=5))
        client.flush()
    come_back(small)
    with small.connect() as client:
        ns, theirs = client.namespace(SPEC), client.namespace(ACME)
        assert ns.lookup(ids).tokens == BLOCK
        assert ns.lookup(kept).tokens == len(kept)
        assert theirs.lookup(tokens(2, seed=4)).tokens == 0
        assert theirs.lookup(tokens(2, seed=5)).tokens == 2 * BLOCK
        with ns.begin(kept, keep=0) as sequence:
            check(ns, sequence)


def test_slots_that_deleted_blocks_had_left_long_before(small: Daemon) -> None:
    """On disk their headers are whole, and only the list of deletions knows better."""
    ids = tokens(4, seed=1)
    with small.connect() as client:
        ns = client.namespace(SPEC)
        store(ns, ids)
        client.flush()
        drive_out(client, ns, ids)
        store(ns, ids)
        client.flush()
        assert delete(client, hash=names(ids)[0]).blocks == 4
    shutil.rmtree(small.state / "quarantine")
    lose_the_index(small)
    with small.connect() as client:
        assert client.namespace(SPEC).lookup(ids).tokens == 0


def test_a_tenant_whose_blocks_are_nobodys_yet_is_not_deleted_by_half(small: Daemon) -> None:
    """Made anew, an index knows no tenants until workers come back."""
    ids = tokens(2, seed=1)
    more = msgspec.structs.replace(ACME, salt="more")
    with small.connect() as client:
        store(client.namespace(ACME), ids)
        store(client.namespace(more), ids)
        client.flush()
    lose_the_index(small)
    with small.connect() as client:
        client.namespace(ACME)
        with pytest.raises(InvalidArgument, match=r"these are unknown: 1$"):
            delete(client, tenant="acme")
        assert client.namespace(ACME).lookup(ids).tokens == len(ids)
        client.namespace(more)
        assert delete(client, tenant="acme").blocks == 4


def test_pinned_blocks_are_not_deleted(small: Daemon) -> None:
    ids = tokens(3, seed=1)
    with small.connect() as client:
        ns = client.namespace(SPEC)
        store(ns, ids)
        pin(client, hash=names(ids)[1])
        assert delete(client, really=False, hash=names(ids)[0]).pinned == 2
        with pytest.raises(InvalidArgument, match="2 of 3 blocks are pinned"):
            delete(client, hash=names(ids)[0])
        assert ns.lookup(ids).tokens == len(ids)
        assert delete(client, hash=names(ids)[2]).blocks == 1


def test_a_stop_in_the_midst_of_deletions_and_checkpoints_is_a_clean_one() -> None:
    with running(SMALL) as daemon:
        with daemon.connect() as client:
            store(client.namespace(SPEC), tokens(5, seed=1))
        with Peer(daemon) as one, Peer(daemon) as other:
            one.hello()
            other.hello()
            for number in range(2, 30):
                one.send(number, m.Delete(m.Selector(namespace=0), really=True))
                other.send(number, m.Flush())
            one.receive()
            assert daemon.stop() == 0, daemon.said()
        daemon.start()
        with daemon.connect() as client:
            assert client.namespace(SPEC).lookup(tokens(5, seed=1)).tokens == 0


# --- warming --------------------------------------------------------------------------------------


def test_warming_takes_what_is_free(small: Daemon) -> None:
    ids = tokens(6, seed=1)
    with small.connect() as client:
        ns = client.namespace(SPEC)
        store(ns, ids)
        client.flush()
        evict_all(client, ns)
        until(lambda: ns.lookup(ids).device < 6)
        before = ns.lookup(ids)
        warmed = warm(client, hash=names(ids)[3])
        assert warmed.were + warmed.blocks == 6
        assert warmed.left == 0
        assert warmed.blocks == before.disk > 0
        found = ns.lookup(ids)
        assert (found.device, found.disk) == (6, 0)
        assert warm(client, hash=names(ids)[3]).blocks == 0
