"""What the connector tells: events for routers, counts; and what it may be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.engines.vllm.checks import hits_all, hits_none, same, stored, until
from tests.engines.vllm.conftest import Truth
from tests.engines.vllm.engine import BLOCK, Engines, ask
from tests.engines.vllm.prompts import distinct_blocks, family
from tests.service.running import Daemon

PROMPTS = family(96, [40, 70, 5], 300)
ASKS = [ask(tokens, max_tokens=2) for tokens in PROMPTS]
BLOCKS = distinct_blocks(PROMPTS)


class Router:
    """Hears the events of one engine."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)
        self.stored: list[dict[str, Any]] = []

    def listen(self) -> None:
        """Take what has arrived: ``BlockStored`` events of blocks in memory beside the engine's."""
        while self._socket.poll(50):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored" and event["medium"] == "CPU":
                    self.stored.append(event)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def test_a_router_hears_of_every_block_that_is_stored(
    engines: Engines, tiny: Path, daemon: Daemon, tmp_path: Path
) -> None:
    """Under vLLM's own names, with tokens and parents, so that it can follow each chain."""
    router = Router(tmp_path)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": router.endpoint,
    }
    try:
        with engines.start(tiny, daemon, kv_events_config=events) as engine:
            engine.generate(ASKS)

            def heard() -> bool:
                engine.call("idle", 0.05)
                router.listen()
                return (
                    len({name for event in router.stored for name in event["block_hashes"]})
                    >= BLOCKS
                )

            until(heard, lambda: (router.stored, engine.said()[-2000:]))
    finally:
        router.close()
    names: set[Any] = set()
    chains: dict[Any, list[int]] = {}
    for event in router.stored:
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        assert event["block_size"] == BLOCK
        assert len(tokens) == BLOCK * len(event["block_hashes"])
        before = [] if parent is None else chains[parent]
        for number, name in enumerate(event["block_hashes"]):
            before = before + tokens[number * BLOCK : (number + 1) * BLOCK]
            chains[name] = before
            names.add(name)
    assert len(names) == BLOCKS
    for prompt in PROMPTS:
        whole = [int(token) for token in prompt[: len(prompt) // BLOCK * BLOCK]]
        assert whole in chains.values()


def test_counts_add_up(engines: Engines, tiny: Path, daemon: Daemon, truth: Truth) -> None:
    """What one engine saved the next one loaded; vLLM's metrics say so."""
    with engines.start(tiny, daemon) as engine:
        same(engine.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        engine.call("idle", 0.2)
        saved = engine.call("metrics")
        engine.forget()
        answers = engine.generate(ASKS)
        hits_all(answers, ASKS)
        loaded = engine.call("metrics")
    assert saved["vllm:tierkv_saved_blocks"] == BLOCKS
    assert saved["vllm:tierkv_saved_bytes"] > 0
    assert 0 < saved["vllm:tierkv_lookups"] <= len(ASKS)
    assert saved.get("vllm:tierkv_dropped_save_blocks", 0) == 0
    hits = sum(answer.cached for answer in answers)
    assert loaded["vllm:tierkv_hit_tokens"] > 0
    assert loaded["vllm:tierkv_loaded_blocks"] * BLOCK == loaded["vllm:tierkv_hit_tokens"]
    assert loaded["vllm:tierkv_hit_tokens"] <= hits
    assert loaded.get("vllm:tierkv_failed_load_blocks", 0) == 0


@pytest.mark.parametrize(
    ("role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True)]
)
def test_an_engine_has_the_role_it_is_given(
    engines: Engines, tiny: Path, daemon: Daemon, truth: Truth, role: str, saves: bool, loads: bool
) -> None:
    """One that only stores, or only reads."""
    with engines.start(tiny, daemon, transfer={"kv_role": role}) as engine:
        hits_none(engine.generate(ASKS[:1]))
        engine.call("idle", 0.3)
        assert bool(daemon.status()["blocks"]) == saves
        with engines.start(tiny, daemon) as other:
            other.generate(ASKS)
            stored(daemon, BLOCKS)
        engine.forget()
        answers = engine.generate(ASKS)
        same(answers, truth(ASKS))
        assert (engine.external_hits() > 0) == loads


def test_a_request_may_opt_out(engines: Engines, tiny: Path, daemon: Daemon, truth: Truth) -> None:
    """Of being stored, or of being served from the store."""

    def with_wish(**wish: bool) -> list[dict[str, Any]]:
        params = {"kv_transfer_params": {f"tierkv.{key}": value for key, value in wish.items()}}
        return [ask(tokens, max_tokens=2, extra_args=params) for tokens in PROMPTS]

    with engines.start(tiny, daemon) as engine:
        same(engine.generate(with_wish(save=False)), truth(ASKS))
        engine.call("idle", 0.3)
        assert daemon.status()["blocks"] == 0
        engine.forget()
        same(engine.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        engine.forget()
        before = engine.external_hits()
        same(engine.generate(with_wish(read=False)), truth(ASKS))
        assert engine.external_hits() == before
        engine.forget()
        answers = engine.generate(ASKS)
        hits_all(answers, ASKS)


def test_a_reset_of_the_connector_forgets_what_was_stored(
    engines: Engines, tiny: Path, daemon: Daemon, truth: Truth
) -> None:
    """As after new weights were put into the running engine: only what comes after is found."""
    with engines.start(tiny, daemon) as engine:
        engine.generate(ASKS)
        stored(daemon, BLOCKS)
        engine.call("idle", 0.2)
        engine.call("reset")
        before = engine.external_hits()
        same(engine.generate(ASKS[:1]), truth(ASKS[:1]))
        assert engine.external_hits() == before
        stored(daemon, BLOCKS + 1)
        engine.call("idle", 0.3)
        engine.forget()
        hits_all(engine.generate(ASKS[:1]), ASKS[:1])
        with engines.start(tiny, daemon) as other:
            hits_all(other.generate(ASKS), ASKS)
