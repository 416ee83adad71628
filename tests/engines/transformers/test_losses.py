"""The daemon dies, forgets, hangs or is full in the middle of a generation: same tokens."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import tierkv
from examples.demo_daemon import DemoDaemon
from tests.engines.transformers.running import GREEDY, After, Tokens, by_hand, held, stored
from tests.engines.transformers.tiny import llama, prompt, ragged
from tierkv.errors import PoolExhausted
from tierkv.integrations.transformers import Attached, attach

MIB = 1 << 20
Stroke = Callable[[DemoDaemon], None]


def restarts(daemon: DemoDaemon) -> None:
    """It comes back with all it had."""
    daemon.kill()
    daemon.launch()


def forgets(daemon: DemoDaemon) -> None:
    """Another one takes its place, which knows no lease and no block."""
    daemon.kill()
    daemon.forget_ram()
    shutil.rmtree(Path(daemon.folder) / "state")
    daemon.launch()


def dies(daemon: DemoDaemon) -> None:
    """Nobody comes."""
    daemon.kill()


STROKES = {"restarts": restarts, "forgets": forgets, "dies": dies}


@pytest.fixture
def attached(own_daemon: DemoDaemon, model: Any, request: Any) -> Iterator[Attached]:
    """Waits for a daemon that will come, and not for one that will not."""
    reconnect_s = 0.2 if "dies" in request.node.name else 30
    with tierkv.connect(own_daemon.socket, reconnect_s=reconnect_s) as client:
        yield attach(model, client)


@pytest.mark.parametrize("stroke", STROKES.values(), ids=STROKES)
def test_between_two_tokens(
    own_daemon: DemoDaemon, model: Any, attached: Attached, stroke: Stroke
) -> None:
    streamer = Tokens(10, lambda: stroke(own_daemon))
    cache = attached.cache()
    got = model.generate(prompt(100), streamer=streamer, **by_hand(attached, cache), **GREEDY)
    assert torch.equal(got, llama().generate(prompt(100), **GREEDY))
    assert cache.pooled == (stroke is not dies)


@pytest.mark.parametrize("stroke", STROKES.values(), ids=STROKES)
def test_while_a_layer_is_computed(
    own_daemon: DemoDaemon, model: Any, attached: Attached, stroke: Stroke
) -> None:
    """What the step reads may be another's by then: it is computed again if that is so."""
    passes = 0

    def strike(_module: Any, _args: Any, _output: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 10:
            pool = attached.namespace.blocks
            stroke(own_daemon)
            if stroke is not restarts:
                pool.normal_(std=20)

    model.model.layers[1].register_forward_hook(strike)
    got = model.generate(prompt(100), **GREEDY)
    assert torch.equal(got, llama().generate(prompt(100), **GREEDY))


@pytest.mark.parametrize("stroke", STROKES.values(), ids=STROKES)
def test_in_a_beam_search(
    own_daemon: DemoDaemon, model: Any, attached: Attached, stroke: Stroke
) -> None:
    way = {**ragged(70, [0, 20]), **GREEDY, "num_beams": 3}
    processors = LogitsProcessorList([After(10, lambda: stroke(own_daemon))])
    got = model.generate(**way, logits_processor=processors)
    assert torch.equal(got, llama().generate(**way))


@pytest.mark.parametrize("stroke", STROKES.values(), ids=STROKES)
def test_between_prompt_lookups(
    own_daemon: DemoDaemon, model: Any, attached: Attached, stroke: Stroke
) -> None:
    ids = prompt(20).repeat(1, 4)
    processors = LogitsProcessorList([After(8, lambda: stroke(own_daemon))])
    got = model.generate(ids, logits_processor=processors, prompt_lookup_num_tokens=5, **GREEDY)
    assert torch.equal(got, llama().generate(ids, **GREEDY))


def test_it_forgets_again_and_again(own_daemon: DemoDaemon, model: Any, attached: Attached) -> None:
    """After some losses the batch is computed in this process; the next one is in the pool."""

    class Unlucky(Tokens):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.tokens) in (3, 6, 9, 12):
                forgets(own_daemon)

    cache = attached.cache()
    got = model.generate(prompt(100), streamer=Unlucky(), **by_hand(attached, cache), **GREEDY)
    assert torch.equal(got, llama().generate(prompt(100), **GREEDY))
    assert not cache.pooled


def test_a_new_daemon_is_used_after_one_that_dies(
    own_daemon: DemoDaemon, model: Any, attached: Attached
) -> None:
    expected = llama().generate(prompt(100), **GREEDY)
    own_daemon.kill()
    cache = attached.cache()
    got = model.generate(prompt(100), **by_hand(attached, cache), **GREEDY)
    assert torch.equal(got, expected)
    assert not cache.pooled
    own_daemon.start()
    deadline = time.monotonic() + 30
    while not cache.pooled and time.monotonic() < deadline:
        cache = attached.cache()
        assert torch.equal(
            model.generate(prompt(100), **by_hand(attached, cache), **GREEDY), expected
        )
    assert cache.pooled


def test_a_full_pool(model: Any) -> None:
    """Where the sequence does not fit any more, it goes on in this process' memory."""
    expected = llama().generate(prompt(100), **GREEDY)
    with DemoDaemon(8 * 32768, MIB, 16 * MIB) as daemon:
        daemon.start()
        with tierkv.connect(daemon.socket) as client:
            attached = attach(model, client)
            assert attached.spec.block_bytes == 16384
            cache = attached.cache()
            blocker = attached.namespace.begin([])
            slots = int(client.stat()["tiers"]["device"]["capacity_bytes"]) // 16384
            blocker.reserve((slots - 8) * 16)
            got = model.generate(prompt(100), **by_hand(attached, cache), **GREEDY)
            assert torch.equal(got, expected)
            assert not cache.pooled
            blocker.end()
            cache = attached.cache()
            with pytest.raises(PoolExhausted):
                attached.namespace.begin([], reserve=slots * 16 + 1)


def test_nothing_is_held_in_the_end(own_daemon: DemoDaemon, model: Any, attached: Attached) -> None:
    """Not by caches that were ended, nor by those that were dropped, nor after an error."""
    ids = prompt(100)
    for way in ({}, {"num_beams": 3}, {"return_dict_in_generate": True}):
        model.generate(ids, **way, **GREEDY)

    class Broken(Tokens):
        def put(self, value: Any) -> None:
            raise RuntimeError("nobody listens")

    with pytest.raises(RuntimeError, match="nobody listens"):
        model.generate(ids, streamer=Broken(), **GREEDY)
    attached.cache()
    attached.cache().end()
    assert held(attached.client) == 0
    assert stored(attached.client) > 0


def test_a_daemon_that_hangs(own_daemon: DemoDaemon, model: Any) -> None:
    """It is stopped for good in the middle: the generation goes on after the client's time."""
    expected = llama().generate(prompt(100), **GREEDY)
    with tierkv.connect(own_daemon.socket, call_timeout_s=0.5, reconnect_s=0.5) as client:
        attached = attach(model, client)
        pid = own_daemon._process.pid
        streamer = Tokens(10, lambda: os.kill(pid, signal.SIGSTOP))
        cache = attached.cache()
        try:
            got = model.generate(
                prompt(100), streamer=streamer, **by_hand(attached, cache), **GREEDY
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        assert torch.equal(got, expected)
        assert not cache.pooled
