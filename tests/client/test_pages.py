"""Namespace.write_pages and read_pages: an engine's own memory in, and out again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.client.fake_daemon import SLOTS
from tests.client.test_writing import BLOCK, STOCK, asked, check, held, payload, prompt, write
from tierkv import KVSpec, Pages, aio
from tierkv.client import stock
from tierkv.errors import InvalidArgument, PoolExhausted, Unavailable
from tierkv.rpc import messages as m

WIDTHS = (200, 40, 272)
"""Bytes of a block's pages, which make a block of the fixture's spec."""

ENGINE_BLOCKS = 40


def engine(value: int = 0) -> Pages:
    """Memory of an engine with gaps between its pages."""
    arrays = [np.full((ENGINE_BLOCKS, width + 4), value, np.uint8) for width in WIDTHS]
    return Pages([array[:, :-4] for array in arrays])


def places(count: int, seed: int = 5) -> np.ndarray:
    """Blocks of an engine, in the order in which it happened to give them out."""
    return np.random.default_rng(seed).permutation(ENGINE_BLOCKS)[:count]


def compute(ns, tokens, ids, first: int = 0) -> Pages:
    """What an engine has in its blocks ``ids`` after it computed ``tokens`` from a block on."""
    assert sum(WIDTHS) == ns.spec.block_bytes
    pages, at = engine(), 0
    rows = payload(ns.spec, tokens)[first:]
    for array, width in zip(pages.arrays, WIDTHS, strict=True):
        array[ids] = rows[:, at : at + width]
        at += width
    return pages


def holds(pages: Pages, ids) -> np.ndarray:
    return np.concatenate([array[ids] for array in pages.arrays], 1)


def write_pages(ns, tokens, first: int = 0, **options) -> int:
    ids = places(len(tokens) // BLOCK - first)
    return ns.write_pages(tokens, compute(ns, tokens, ids, first), ids, first=first, **options)


def test_pages_go_in_and_come_out(daemon, ns) -> None:
    tokens = prompt(1, 3)
    assert write_pages(ns, tokens) == 3
    assert asked(daemon, ns) == [m.Acquire, m.Store]
    check(ns, tokens)
    for ids in (places(3, 1), places(3, 2).astype(np.int32), places(3, 3).tolist()):
        pages = engine(9)
        assert ns.read_pages(tokens, pages, ids) == 3
        np.testing.assert_array_equal(holds(pages, ids), payload(ns.spec, tokens))
        others = np.setdiff1d(np.arange(ENGINE_BLOCKS), ids)
        assert (holds(pages, others) == 9).all()


def test_any_number_of_blocks_goes_in_parts(daemon, ns) -> None:
    """No part takes more room than a stock may."""
    tokens = prompt(2, 2 * STOCK + 1)
    assert write_pages(ns, tokens) == 2 * STOCK + 1
    assert asked(daemon, ns) == [m.Acquire, m.Store, m.Store, m.Store]
    check(ns, tokens)
    more = np.concatenate([tokens, prompt(3, STOCK + 1)])
    asked(daemon, ns)
    assert write_pages(ns, more, 2 * STOCK + 1) == STOCK + 1
    assert set(asked(daemon, ns)) == {m.Reserve, m.Store}
    check(ns, more)


def test_a_tier_too_small_for_a_stock_takes_them_by_a_sequence(daemon, ns, monkeypatch) -> None:
    monkeypatch.setattr(stock, "STOCKS_MIN", 2 * SLOTS)
    tokens = prompt(4, 5)
    assert write_pages(ns, tokens) == 5
    assert asked(daemon, ns) == [m.Acquire, m.Seal, m.Release]
    check(ns, tokens)


def test_reading_begins_at_any_block(ns) -> None:
    tokens = prompt(5, 4)
    write_pages(ns, tokens)
    for first in range(5):
        pages, ids = engine(9), places(4 - first)
        assert ns.read_pages(tokens, pages, ids, first=first) == 4 - first
        np.testing.assert_array_equal(holds(pages, ids), payload(ns.spec, tokens)[first:])
    longer = np.concatenate([tokens, prompt(6, 2)])
    for first, found in ((3, 1), (4, 0), (5, 0)):
        ids = places(6 - first)
        assert ns.read_pages(longer, engine(), ids, first=first) == found


def test_without_the_blocks_before_nothing_goes_in(daemon, ns) -> None:
    write_pages(ns, prompt(7))
    assert write_pages(ns, prompt(8, 2), 1) == 0
    assert ns.lookup(prompt(8, 2)).tokens == 0
    assert len(held(daemon, ns)) == 1


def test_extra_keys_make_other_blocks(ns) -> None:
    tokens, keys = prompt(9, 2), [None, b"image"]
    write_pages(ns, tokens, extra_keys=keys)
    assert ns.read_pages(tokens, engine(), places(2)) == 1
    assert ns.read_pages(tokens, engine(), places(2), extra_keys=keys) == 2
    assert ns.read_pages(tokens, engine(), places(1), first=1, extra_keys=keys) == 1
    assert ns.read_pages(tokens, engine(), places(1), first=1) == 0


def test_no_blocks_are_nothing(daemon, ns) -> None:
    assert ns.write_pages(prompt(10), engine(), []) == 0
    assert ns.read_pages(prompt(10), engine(), [], first=1) == 0
    assert asked(daemon, ns) == []
    assert daemon.count(m.Lookup) == 0


def test_a_sequence_takes_pages_too(ns) -> None:
    tokens, ids = prompt(11, 3), places(2)
    with ns.begin(tokens, keep=0, reserve=0) as sequence:
        sequence.write_blocks(0, payload(ns.spec, tokens)[:1])
        assert sequence.write_pages(1, compute(ns, tokens, ids, 1), ids) == 2
        sequence.append(tokens)
        pages = engine()
        assert sequence.read_pages(0, pages, [3, 1]) == 2
        np.testing.assert_array_equal(holds(pages, [3, 1]), payload(ns.spec, tokens)[:2])
        with pytest.raises(InvalidArgument, match=r"ids\[1\] and ids\[2\] are both 4"):
            sequence.read_pages(0, pages, [1, 4, 4])
        with pytest.raises(InvalidArgument, match="may not be written"):
            sequence.write_pages(1, pages, [1])
    check(ns, tokens)


def test_what_is_cached_in_the_meantime_is_not_copied_twice(daemon, ns) -> None:
    write_pages(ns, prompt(12))
    cached = dict(daemon.cached)
    assert write_pages(ns, prompt(12)) == STOCK
    assert daemon.cached == cached


def read_only(pages: Pages) -> Pages:
    for array in pages.arrays:
        array.flags.writeable = False
    return Pages(pages.arrays)


def test_read_only_pages_are_written_from_and_never_into(ns) -> None:
    tokens, ids = prompt(13, 2), places(2)
    pages = read_only(compute(ns, tokens, ids))
    assert ns.write_pages(tokens, pages, ids) == 2
    check(ns, tokens)
    with pytest.raises(InvalidArgument, match="pages are read-only"):
        ns.read_pages(tokens, pages, ids)


BAD_IDS = [
    ([0, ENGINE_BLOCKS], rf"ids\[1\] is {ENGINE_BLOCKS}; pages have blocks 0 to 39"),
    ([0, -1], r"ids\[1\] is -1"),
    ([0, 2**40], rf"ids\[1\] is {2**40}"),
    ([0.5, 1], r"ids is float64 \[2\]; it must be integers"),
    ([[0, 1]], r"ids is int64 \[1, 2\]"),
    (["a", "b"], r"ids is <U1 \[2\]"),
    ([0, 1, 2], "3 blocks from block 0 on end at token 12; there are 8"),
]


@pytest.mark.parametrize(("ids", "said"), BAD_IDS)
def test_ids_are_those_of_blocks(daemon, ns, ids, said) -> None:
    for call in (ns.write_pages, ns.read_pages):
        with pytest.raises(InvalidArgument, match=said):
            call(prompt(14, 2), engine(), ids)
    assert asked(daemon, ns) == []


@pytest.mark.parametrize("first", [-1, 1, 2])
def test_there_are_tokens_for_every_block(ns, first) -> None:
    for call in (ns.write_pages, ns.read_pages):
        with pytest.raises(InvalidArgument, match="2 blocks from block"):
            call(prompt(15, 2), engine(), [0, 1], first=first)


def test_no_two_blocks_are_read_into_one_place(ns) -> None:
    with pytest.raises(InvalidArgument, match=r"ids\[0\] and ids\[2\] are both 7"):
        ns.read_pages(prompt(16, 3), engine(), [7, 1, 7])


def test_pages_fit_the_namespace(ns) -> None:
    for call in (ns.write_pages, ns.read_pages):
        with pytest.raises(InvalidArgument, match=r"511 bytes together; .* have 512"):
            call(prompt(17, 1), Pages([np.zeros((4, 511), np.uint8)]), [0])
        with pytest.raises(InvalidArgument, match=r"pages is list; make a tierkv\.Pages"):
            call(prompt(17, 1), [np.zeros((4, 512), np.uint8)], [0])


# --- no room, no daemon ---------------------------------------------------------------------------


def test_a_full_pool_is_said(daemon, ns) -> None:
    write_pages(ns, prompt(20, 1))
    with ns.begin([]) as sequence:
        sequence.reserve((len(daemon.free)) * BLOCK)
        with pytest.raises(PoolExhausted):
            write_pages(ns, prompt(21, 2))
    assert write_pages(ns, prompt(21, 2)) == 2
    check(ns, prompt(21, 2))


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("keep_leases", [False, True])
def test_a_daemon_that_dies_over_it_is_asked_again(daemon, ns, done, keep_leases) -> None:
    write_pages(ns, prompt(22))
    if not keep_leases:
        daemon.restart(keep_leases=False)
    (daemon.cut_after if done else daemon.cut_before).append(m.Store)
    tokens = prompt(23, 3 * STOCK)
    assert write_pages(ns, tokens) == 3 * STOCK
    check(ns, tokens)
    assert len(held(daemon, ns)) == 1


def test_without_a_daemon_what_is_there_is_read(daemon, client, ns) -> None:
    tokens = prompt(24, 2)
    with ns.begin(tokens, keep=0, reserve=0) as sequence:
        sequence.write_blocks(0, payload(ns.spec, tokens))
        sequence.append(tokens)
    daemon.stop()
    client._limits = client._limits._replace(reconnect_s=0.05)
    pages = engine()
    assert ns.read_pages(tokens, pages, [3, 1]) == 2
    np.testing.assert_array_equal(holds(pages, [3, 1]), payload(ns.spec, tokens))
    assert ns.read_pages(tokens, pages, [4], first=1) == 1
    with pytest.raises(Unavailable):
        ns.read_pages(prompt(25, 2), pages, [3, 1])


# --- asyncio --------------------------------------------------------------------------------------


def test_the_asyncio_client_does_the_same(daemon, spec, loop_factory) -> None:
    async def main() -> None:
        async with aio.connect(daemon.path, reconnect_s=5) as client:
            ns = await client.namespace(spec)
            prompts = [prompt(30 + n, STOCK + 1) for n in range(3)]
            counts = await asyncio.gather(*[write_pages(ns, tokens) for tokens in prompts])
            assert counts == [STOCK + 1] * 3
            for tokens in prompts:
                pages, ids = engine(), places(STOCK)
                assert await ns.read_pages(tokens, pages, ids, first=1) == STOCK
                np.testing.assert_array_equal(holds(pages, ids), payload(spec, tokens)[1:])
            with pytest.raises(InvalidArgument, match="both 1"):
                await ns.read_pages(prompts[0], pages, [1, 1])
            await client.stat()
            assert len(daemon.held()) == 1
        with pytest.raises(Unavailable, match="closed"):
            await ns.read_pages(prompts[0], pages, [1])

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_blocks_that_only_the_engine_understands(client) -> None:
    spec = KVSpec(model="engine", packing="engine-1", packed_bytes=512, block_tokens=BLOCK)
    ns = client.namespace(spec)
    tokens = prompt(40, 3)
    assert write_pages(ns, tokens) == 3
    pages = engine()
    assert ns.read_pages(tokens, pages, [5, 6, 1]) == 3
    np.testing.assert_array_equal(holds(pages, [5, 6, 1]), payload(spec, tokens))
    assert write(ns, prompt(41, 2)) == 2
    check(ns, prompt(41, 2))
