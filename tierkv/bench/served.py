"""Attention by the daemon, against the same in the worker, and of many workers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import torch

from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import MICROSECONDS, Bench, Line, each_call
from tierkv.client.sync import Client, Namespace, Sequence
from tierkv.core.spec import KVSpec
from tierkv.units import MiB

SPEC = KVSpec(model="bench", layers=1, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
Q_HEADS = 32
WORKERS, TOKENS_EACH = 8, 512


def run(bench: Bench) -> Iterator[Line]:
    """A lone request of a small and of a large step; then many small ones at once."""
    steps = ((1, 512), (8, bench.pick(4096, 512)))
    room = 2 * steps[-1][0] * steps[-1][1] // SPEC.block_tokens * SPEC.block_bytes
    settings = {"device.bytes": str(room + 64 * MiB)}
    with Daemon(bench, bench.all_cores, "attend", settings) as daemon:
        for batch, tokens in steps:
            with daemon.connect() as client:
                yield _alone(bench, client.namespace(SPEC), batch, tokens)
        with ExitStack() as leaving:
            clients = [leaving.enter_context(daemon.connect()) for _ in range(WORKERS)]
            yield _together(bench, clients)


def _alone(bench: Bench, namespace: Namespace, batch: int, tokens: int) -> Line:
    sequences = [_filled(namespace, tokens) for _ in range(batch)]
    q = torch.randn(batch, Q_HEADS, SPEC.head_dim).to(torch.bfloat16)
    there, here = (
        partial(namespace.attention, 0, q, sequences, where=where) for where in ("daemon", "worker")
    )
    torch.testing.assert_close(there(), here(), rtol=2e-2, atol=2e-2)
    calls = bench.pick(40, 2)
    measured = bench.interleave(
        bench.all_cores,
        {
            "daemon": lambda: each_call(there, calls),
            "in the worker": lambda: each_call(here, calls),
        },
    )
    name = f"attention.served.{batch}.{tokens}"
    return measured.line(name, MICROSECONDS, "daemon", ["in the worker"], bench.all_cores)


def _together(bench: Bench, clients: list[Client]) -> Line:
    """Each worker asks for one sequence of its own, all at the same time."""
    asks = [_ask(client) for client in clients]
    with ThreadPoolExecutor(len(clients)) as threads:

        def at_once() -> None:
            for asked in [threads.submit(ask) for ask in asks]:
                asked.result()

        def in_turn() -> None:
            for ask in asks:
                ask()

        calls = bench.pick(40, 2)
        measured = bench.interleave(
            bench.all_cores,
            {
                "at once": lambda: each_call(at_once, calls),
                "one after another": lambda: each_call(in_turn, calls),
            },
        )
    name = f"attention.served.x{len(clients)}"
    references = ["one after another"]
    return measured.line(name, MICROSECONDS, "at once", references, bench.all_cores)


def _ask(client: Client) -> Callable[[], torch.Tensor]:
    namespace = client.namespace(SPEC)
    sequence = _filled(namespace, TOKENS_EACH)
    q = torch.randn(1, Q_HEADS, SPEC.head_dim).to(torch.bfloat16)
    return partial(namespace.attention, 0, q, [sequence], where="daemon")


def _filled(namespace: Namespace, tokens: int) -> Sequence:
    """A sequence of its own with random K and V."""
    sequence = namespace.begin([])
    sequence.reserve(tokens)
    k, v = torch.randn(2, tokens, SPEC.kv_heads, SPEC.head_dim)
    namespace.write_kv(0, sequence, 0, k, v)
    sequence.append(torch.randint(0, 1 << 16, (tokens,)).tolist())
    return sequence
