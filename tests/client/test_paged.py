"""Torch on the mapped pool: views, scatter, block tables, attention here and in the daemon."""

from __future__ import annotations

import asyncio

import pytest
import tierkv_kernels
import torch

import tierkv
from tierkv import KVSpec, aio
from tierkv.client import paged
from tierkv.errors import InvalidArgument, LimitExceeded, Unavailable
from tierkv.rpc import messages as m

LAYERS, HEADS, DIM, BLOCK = 2, 2, 4, 4


def reference(q, k_cache, v_cache, tables, lens, *, q_indptr, scale=None, causal=True, **_):
    """Dense attention, row by row: what the kernel must equal."""
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for b, length in enumerate(lens.tolist()):
        blocks = tables[b, : -(-length // k_cache.shape[1])].long()
        k = k_cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1)
        v = v_cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1)
        first, last = q_indptr[b : b + 2].tolist()
        for row in range(first, last):
            seen = length - (last - 1 - row) if causal else length
            weights = torch.einsum("hd,thd->ht", q[row], k[:seen]) * (scale or q.shape[2] ** -0.5)
            out[row] = torch.einsum("ht,thd->hd", weights.softmax(1), v[:seen])
    return out, torch.zeros(q.shape[:2])


def make_spec(**options):
    return KVSpec(
        **{
            "model": "m",
            "layers": LAYERS,
            "kv_heads": HEADS,
            "head_dim": DIM,
            "block_tokens": BLOCK,
            **options,
        }
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_written_tokens_lie_where_the_layout_says(daemon, client, layout, dtype):
    spec = make_spec(layout=layout, dtype=dtype)
    ns = client.namespace(spec)
    torch_dtype = getattr(torch, dtype)
    sequence = ns.begin([])
    sequence.reserve(11)
    k = torch.arange(11 * HEADS * DIM).reshape(11, HEADS, DIM).float().to(torch_dtype)
    v = (k.float() + 100).to(torch_dtype)
    ns.write_kv(1, sequence, 0, k[:6], v[:6])
    ns.write_kv(1, sequence, 6, k[6:], v[6:])
    blocks = ns.blocks
    assert list(blocks.shape) == [64, LAYERS, 2, BLOCK, HEADS, DIM]
    assert blocks.dtype is torch_dtype
    for position in range(11):
        slot, row = sequence.block_table[position // BLOCK], position % BLOCK
        for view, values in ((ns.k(1), k), (ns.v(1), v)):
            assert list(view.shape) == [64, BLOCK, HEADS, DIM]
            assert torch.equal(view[slot, row].float(), values[position].float())
        assert torch.equal(blocks[slot, 1, 0, row].float(), k[position].float())
    payload = bytes(daemon.pool(spec)[sequence.block_table[0], : spec.block_bytes])
    stored = torch.frombuffer(bytearray(payload), dtype=torch_dtype).float()
    dense = torch.stack((k[:BLOCK].float(), v[:BLOCK].float()))
    dense = dense if layout == "NHD" else dense.transpose(1, 2)
    assert torch.equal(stored.reshape(LAYERS, -1)[1], dense.reshape(-1))
    assert not stored.reshape(LAYERS, -1)[0].any()


def test_only_reserved_tokens_may_be_written(client):
    ns = client.namespace(make_spec())
    sequence = ns.begin([])
    kv = torch.zeros(5, HEADS, DIM)
    sequence.reserve(4)
    with pytest.raises(InvalidArgument, match="tokens 0 to 4"):
        ns.write_kv(0, sequence, 0, kv, kv)
    ns.write_kv(0, sequence, 0, kv[:4], kv[:4])
    sequence.append([1, 2, 3, 4])
    sequence.reserve(1)
    with pytest.raises(InvalidArgument, match="only 4 to 7"):
        ns.write_kv(0, sequence, 3, kv[:1], kv[:1])
    sequence.append([5])
    sequence.fork()
    with pytest.raises(InvalidArgument, match="fork"):
        ns.write_kv(0, sequence, 4, kv[:1], kv[:1])


@pytest.mark.parametrize(
    ("layer", "k", "v"),
    [(0, (1, HEADS, 5), (1, HEADS, DIM)), (0, (2, HEADS, DIM), (1, HEADS, DIM)), (7, None, None)],
)
def test_wrong_shapes_and_layers(client, layer, k, v):
    ns = client.namespace(make_spec())
    sequence = ns.begin([])
    sequence.reserve(4)
    shape = (1, HEADS, DIM)
    with pytest.raises(InvalidArgument):
        ns.write_kv(layer, sequence, 0, torch.zeros(k or shape), torch.zeros(v or shape))


def test_block_tables(client):
    ns = client.namespace(make_spec())
    long, short, empty = ns.begin([]), ns.begin([]), ns.begin([])
    for sequence, count in ((long, 9), (short, 4)):
        sequence.reserve(count)
        sequence.append(list(range(count)))
    tables, lens = ns.block_tables([long, short, empty])
    assert tables.dtype == lens.dtype == torch.int32
    assert lens.tolist() == [9, 4, 0]
    assert tables[0].tolist() == long.block_table.tolist()
    assert tables[1].tolist() == [short.block_table[0], 0, 0]
    assert tables[2].tolist() == [0, 0, 0]


@pytest.fixture
def batch(client):
    """Two sequences of 9 and 4 tokens with random K and V in layer 0, and their namespace."""
    torch.manual_seed(7)
    ns = client.namespace(make_spec())
    sequences, kv = [], []
    for seed, count in ((1, 9), (2, 4)):
        sequence = ns.begin([])
        k, v = torch.randn(2, count, HEADS, DIM)
        sequence.reserve(count)
        ns.write_kv(0, sequence, 0, k, v)
        sequence.append([seed] * count)
        sequences.append(sequence)
        kv.append((k, v))
    return ns, sequences, kv


def dense(q, k, v):
    group = q.shape[0] // HEADS
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = torch.einsum("hd,thd->ht", q, k) * DIM**-0.5
    return torch.einsum("ht,thd->hd", weights.softmax(1), v)


def test_attention_in_the_worker(batch, monkeypatch):
    monkeypatch.setattr(tierkv_kernels, "paged_attention", reference, raising=False)
    ns, sequences, kv = batch
    q = torch.randn(2, 4, DIM)
    out = ns.attention(0, q, sequences)
    for row in range(2):
        torch.testing.assert_close(out[row], dense(q[row], *kv[row]))
    prompt = torch.randn(9, 4, DIM)
    out = ns.attention(0, prompt, sequences[:1])
    for row in range(9):
        k, v = kv[0]
        torch.testing.assert_close(out[row], dense(prompt[row], k[: row + 1], v[: row + 1]))
    ragged = ns.attention(0, torch.cat((prompt, q[1:])), sequences, q_indptr=[0, 9, 10])
    torch.testing.assert_close(ragged[:9], out)
    shorter = ns.attention(0, q, sequences, seq_lens=[5, 4])
    torch.testing.assert_close(shorter[0], dense(q[0], kv[0][0][:5], kv[0][1][:5]))


def test_attention_passes_its_options_on(batch, monkeypatch):
    seen = {}

    def kernel(q, *_, **options):
        seen.update(options)
        return q, None

    monkeypatch.setattr(tierkv_kernels, "paged_attention", kernel, raising=False)
    ns, sequences, _ = batch
    q = torch.zeros(2, 2, DIM)
    ns.attention(0, q, sequences, scale=0.5, causal=False, window=3, softcap=30.0)
    assert seen.pop("q_indptr").tolist() == [0, 1, 2]
    plan = seen.pop("plan")
    assert (plan.causal, plan.window, plan.seq_lens.tolist()) == (False, 3, [9, 4])
    assert seen == {"scale": 0.5, "causal": False, "window": 3, "softcap": 30.0}


def test_all_layers_of_a_step_share_one_plan(batch, monkeypatch):
    plans, tables = [], []

    def kernel(q, _k, _v, table, *_, plan, **_options):
        plans.append(plan)
        tables.append(table)
        return q, None

    monkeypatch.setattr(tierkv_kernels, "paged_attention", kernel, raising=False)
    ns, sequences, _ = batch
    q = torch.zeros(2, 2, DIM)
    for layer in range(ns.spec.layers):
        ns.attention(layer, q, sequences, seq_lens=[8, 4])
    ns.attention(0, q, sequences, seq_lens=[9, 4])
    assert len({id(plan) for plan in plans[:-1]}) == 1
    assert len({id(table) for table in tables[:-1]}) == 1
    assert plans[-1].seq_lens.tolist() == [9, 4]
    ns.attention(0, q, sequences[::-1], seq_lens=[4, 4])
    ns.attention(0, q, sequences, seq_lens=[4, 4])
    assert torch.equal(tables[-1], tables[-2].flip(0))


def test_keys_of_few_rows_are_split_on_a_gpu(batch, monkeypatch):
    monkeypatch.setattr(paged, "GPU_SPLIT_TOKENS", 4)
    ns, sequences, _ = batch
    parts = {}
    for device in ("cpu", "cuda"):
        for tokens in (1, 2, 5):
            options = {"scale": None, "causal": True, "window": -1, "softcap": 0.0}
            q = torch.zeros(tokens, 4 * HEADS, DIM)
            asked = ns._plan(0, q, sequences[:1], None, None, **options)
            work = ns._paged._kernel_plan(asked, torch.device(device))
            parts[device, tokens] = work.num_partials
    chunks = 3  # of the sequence's 9 tokens; a part for each and each query token
    split = {("cuda", 1): chunks, ("cuda", 2): 2 * chunks}
    unsplit = {("cuda", 5): 0, ("cpu", 1): 0, ("cpu", 2): 0, ("cpu", 5): 0}
    assert parts == split | unsplit


def test_attention_in_the_daemon_goes_through_scratch_memory(daemon, batch):
    ns, sequences, _ = batch
    q = torch.randn(3, 4, DIM)
    out = ns.attention(1, q, sequences, q_indptr=[0, 1, 3], where="daemon", softcap=9.0)
    assert torch.equal(out, 2 * q)
    request = daemon.requests[-1]
    assert (request.layer, request.q_heads, request.softcap) == (1, 4, 9.0)
    assert request.sequences == [1, 2]
    assert torch.frombuffer(bytearray(request.seq_lens), dtype=torch.int32).tolist() == [9, 4]
    assert request.lse_offset + 3 * 4 * 4 <= 1 << 16


def test_attention_in_the_daemon_is_asked_again_with_its_query(daemon, batch):
    ns, sequences, _ = batch
    q = torch.randn(2, 4, DIM)
    daemon.cut_before.append(m.Attend)
    assert torch.equal(ns.attention(0, q, sequences, where="daemon"), 2 * q)


def test_a_request_that_was_given_up_has_the_scratch_memory_until_it_is_answered(daemon):
    with tierkv.connect(daemon.path, call_timeout_s=0.3) as client:
        ns = client.namespace(make_spec())
        sequence = ns.begin([])
        sequence.reserve(4)
        sequence.append([1] * 4)
        q = torch.randn(1, 4, DIM)
        daemon.silent.append(m.Attend)
        for _ in range(2):
            with pytest.raises(Unavailable, match="in time"):
                ns.attention(0, q, [sequence], where="daemon")
        assert daemon.count(m.Attend) == 1
        assert client.stat()["epoch"] == 1
        (connection,) = daemon.of_connection
        late = next(iter(connection._in_flight))
        daemon.serving.call(connection.reply, late, m.Done())
        assert torch.equal(ns.attention(0, q, [sequence], where="daemon"), 2 * q)


def test_a_task_that_was_cancelled_has_the_scratch_memory_until_it_is_answered(
    daemon, loop_factory
):
    async def main():
        async with aio.connect(daemon.path) as client:
            ns = await client.namespace(make_spec())
            sequence = await ns.begin([])
            await sequence.reserve(4)
            await sequence.append([1] * 4)
            q = torch.randn(1, 4, DIM)
            daemon.silent.append(m.Attend)
            task = asyncio.create_task(ns.attention(0, q, [sequence], where="daemon"))
            while not daemon.count(m.Attend):  # noqa: ASYNC110  # nobody signals it
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await ns.attention(0, q, [sequence], where="daemon")
            assert daemon.count(m.Attend) == 1
            (connection,) = daemon.of_connection
            late = next(iter(connection._in_flight))
            daemon.serving.call(connection.reply, late, m.Done())
            assert torch.equal(await ns.attention(0, q, [sequence], where="daemon"), 2 * q)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_the_pool_takes_no_part_in_gradients(client):
    ns = client.namespace(make_spec())
    sequence = ns.begin([])
    sequence.reserve(1)
    kv = torch.ones(1, HEADS, DIM, requires_grad=True)
    ns.write_kv(0, sequence, 0, kv, kv)
    assert not ns.k(0).requires_grad
    assert ns.k(0)[sequence.block_table[0], 0].sum() == HEADS * DIM


def test_a_query_too_large_for_the_scratch_memory(batch):
    ns, sequences, _ = batch
    with pytest.raises(LimitExceeded, match="fewer tokens"):
        ns.attention(0, torch.zeros(4096, 4, DIM), sequences[:1], where="daemon")


@pytest.mark.parametrize(
    "options",
    [
        {"q": torch.zeros(2, 3, DIM)},
        {"q": torch.zeros(2, 2, DIM + 1)},
        {"q": torch.zeros(3, 2, DIM)},
        {"q_indptr": [0, 1]},
        {"q_indptr": [0, 2, 1]},
        {"q_indptr": [1, 1, 2]},
        {"seq_lens": [9]},
        {"seq_lens": [13, 4]},
        {"seq_lens": [-1, 4]},
        {"where": "elsewhere"},
    ],
)
def test_impossible_attention(batch, options):
    ns, sequences, _ = batch
    arguments = {"q": torch.zeros(2, 2, DIM), **options}
    with pytest.raises(InvalidArgument):
        ns.attention(0, sequences=sequences, **arguments)


def test_attention_by_the_asyncio_client(daemon, loop_factory, monkeypatch):
    monkeypatch.setattr(tierkv_kernels, "paged_attention", reference, raising=False)

    async def main():
        async with aio.connect(daemon.path) as client:
            ns = await client.namespace(make_spec())
            sequence = await ns.begin([])
            await sequence.reserve(3)
            k, v = torch.randn(2, 3, HEADS, DIM)
            ns.write_kv(0, sequence, 0, k, v)
            await sequence.append([1, 2, 3])
            q = torch.randn(1, 2, DIM)
            out = await ns.attention(0, q, [sequence])
            torch.testing.assert_close(out[0], dense(q[0], k, v))
            twice = await asyncio.gather(
                *(ns.attention(0, q + i, [sequence], where="daemon") for i in range(4))
            )
            for i, doubled in enumerate(twice):
                assert torch.equal(doubled, 2 * (q + i))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_views_follow_a_new_arena(daemon, client):
    spec = make_spec()
    ns = client.namespace(spec)
    old = ns.blocks
    assert ns.blocks is old
    daemon.stop()
    daemon.new_arena()
    daemon.start()
    client.stat()
    ns.k(0)[5] = 3.0
    assert daemon.pool(spec)[5, :BLOCK].any()
    assert not old[5].any()
