"""The connector's two sides without an engine, where an engine would have to be unlucky."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.engines.vllm.engine import BLOCK
from tests.service.running import Daemon, until
from tierkv import KVSpec, connect
from tierkv.errors import InvalidArgument
from tierkv.integrations.attachment import Attachment
from tierkv.integrations.vllm.attaching import attachment
from tierkv.integrations.vllm.chain import Chain, ChainOf
from tierkv.integrations.vllm.geometry import Geometry
from tierkv.integrations.vllm.identity import spec_of
from tierkv.integrations.vllm.loader import Loader
from tierkv.integrations.vllm.memory import EngineMemory
from tierkv.integrations.vllm.messages import Load, Save
from tierkv.integrations.vllm.saver import Saver
from tierkv.integrations.vllm.scheduler import Roles, SchedulerSide
from tierkv.integrations.vllm.settings import Settings
from tierkv.integrations.vllm.stats import Counts

LAYER, HEADS, SIZE, ENGINE_BLOCKS = "layer", 2, 8, 16
BLOCK_BYTES = HEADS * BLOCK * SIZE * 4
SPEC = KVSpec(model="m", packing="test", packed_bytes=BLOCK_BYTES, block_tokens=BLOCK)
TOKENS = np.arange(1, 4 * BLOCK + 2)
PATIENT_S = 20.0


def group(**more: Any) -> KVCacheGroupSpec:
    """Full attention of one layer."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE // 2, dtype=torch.float32
    )
    return KVCacheGroupSpec([LAYER], spec, **more)


CACHES = KVCacheConfig(
    num_blocks=ENGINE_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group()], hash_block_size=BLOCK
)


@pytest.fixture
def cached(daemon: Daemon) -> Daemon:
    """A daemon that has the blocks of TOKENS."""
    with connect(daemon.socket) as client:
        data = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert client.namespace(SPEC).write(TOKENS[: 4 * BLOCK], data) == 4
    return daemon


@contextmanager
def scheduling(daemon: Daemon) -> Iterator[SchedulerSide]:
    """The scheduler's side of an engine with one worker."""
    roles = Roles(loads=True, saves=True, tells=False, knows_media=True)
    settings = Settings(socket=str(daemon.socket), lookup_timeout_s=PATIENT_S)
    side = SchedulerSide(CACHES, settings, generate_block_hash_extra_keys, roles)
    side.attach([SPEC])
    try:
        yield side
    finally:
        side.close()


def request(name: str = "r") -> Request:
    """A request for one token after TOKENS."""
    return Request(name, TOKENS.tolist(), SamplingParams(max_tokens=1), pooling_params=None)


def empty_step() -> SchedulerOutput:
    """A step in which no request runs."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(), resolve_block_ids=lambda _: (), boundary_state_offloads={}
    )
    return output


def test_what_was_found_before_a_reset_is_not_promised_after_it(cached: Daemon) -> None:
    """Nobody would load it, and the engine would wait for ever."""
    with scheduling(cached) as side:
        waiting = request()
        assert side.match(waiting, 0) == 4 * BLOCK
        side.forget()
        assert side.match(waiting, 0) == 0


def test_a_load_that_one_worker_could_not_do_is_not_asked_for_again(cached: Daemon) -> None:
    """It says so in the step in which it notices; other workers may take longer."""
    with scheduling(cached) as side:
        asking = request()
        tokens = side.match(asking, 0)
        side.allocated(asking, ([3, 4, 5, 6],), tokens)
        side.loaded((), {3}, set())
        side.loaded({"r"}, set(), set())
        assert side.match(asking, 0) == 0


def test_blocks_that_another_connector_may_load_into_are_written(cached: Daemon) -> None:
    """A save that still reads them lets them be."""
    with scheduling(cached) as side:
        asking = request()
        side.match(asking, BLOCK)
        side.allocated(asking, ([3, 4, 5, 6],), 0)
        step = side.step(empty_step())
        assert (step.loads, step.written) == ([], [4, 5, 6])
        assert side.step(empty_step()).written == []


def test_media_that_a_session_gets_later_are_in_its_names() -> None:
    """Its first message had none."""
    session = Request("s", TOKENS.tolist(), SamplingParams(max_tokens=1), None, resumable=True)
    chain = ChainOf(session, BLOCK, (), generate_block_hash_extra_keys)
    assert chain.first(4).extra_keys is None
    place = PlaceholderRange(offset=2 * BLOCK, length=BLOCK)
    session.mm_features.append(MultiModalFeatureSpec(None, "image", "cat", place))
    keys = chain.first(4).extra_keys
    assert keys is not None
    assert [key is not None for key in keys] == [False, False, True, False]


def test_the_workers_must_say_what_their_blocks_are(cached: Daemon) -> None:
    """Else every lookup would find everything."""
    with scheduling(cached) as side, pytest.raises(InvalidArgument, match="MultiConnector"):
        side.attach([])


def test_a_kv_cache_with_copies_that_nobody_tells_of_is_refused() -> None:
    """Their blocks may be those that are being saved."""
    hot = KVCacheConfig(
        num_blocks=ENGINE_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[group(), group(enable_kv_transfer=False)],
    )
    with pytest.raises(InvalidArgument, match="HiSparse"):
        Geometry.of(hot)


# --- a worker's ----------------------------------------------------------------------------------


class Worker:
    """A worker's KV memory, and a connection."""

    def __init__(self, daemon: Daemon) -> None:
        self.cache = torch.zeros(ENGINE_BLOCKS, HEADS, BLOCK, SIZE)
        self.memory = EngineMemory(Geometry.of(CACHES), {LAYER: self.cache}, ENGINE_BLOCKS)
        settings = Settings(socket=str(daemon.socket))
        self.attachment: Attachment = attachment(settings, [SPEC], "test", PATIENT_S)
        self.counts = Counts()


def chain(start: int) -> Chain:
    """A block of tokens from ``start`` on."""
    return Chain(np.arange(start, start + BLOCK, dtype=np.uint32), None)


def found(daemon: Daemon, start: int) -> int:
    """Blocks of that chain that the daemon has."""
    with connect(daemon.socket) as client:
        return client.namespace(SPEC).lookup(chain(start).tokens, keep=0).tokens // BLOCK


def test_what_a_later_step_writes_is_not_saved_for_an_earlier_one(daemon: Daemon) -> None:
    """However long the daemon lets saves wait."""
    worker = Worker(daemon)
    saver = Saver(worker.attachment, worker.memory, worker.counts)
    try:
        daemon.signal(signal.SIGSTOP)
        saver.let_be([1, 2, 3])
        for number, start in ((1, 100), (2, 200), (3, 300)):
            saver.submit(Save(number, chain(start), np.array([[number]], np.int32)))
        saver.let_be([2])
        worker.cache[2] = 1.0
        saver.submit(Save(4, chain(400), np.array([[2]], np.int32)))
        daemon.signal(signal.SIGCONT)
        saver.settle(PATIENT_S)
    finally:
        saver.close(PATIENT_S)
        worker.attachment.close()
    assert [found(daemon, start) for start in (100, 200, 300, 400)] == [1, 0, 1, 1]


def test_a_block_that_is_not_saved_is_counted_once(daemon: Daemon) -> None:
    """Though every later save of its chain has it, too."""
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    worker = Worker(daemon)
    saver = Saver(worker.attachment, worker.memory, worker.counts)
    tokens = np.arange(3 * BLOCK, dtype=np.uint32)
    for full in (1, 2, 3):
        rows = np.arange(1, full + 1, dtype=np.int32).reshape(-1, 1)
        saver.submit(Save(full, Chain(tokens[: full * BLOCK], None), rows, full - 1))
    saver.close(PATIENT_S)
    worker.attachment.close()
    counted = worker.counts.take()
    assert counted is not None
    assert counted.data["dropped_save_blocks"] == 3


def test_loads_do_not_wait_for_a_daemon_one_after_another(daemon: Daemon) -> None:
    """All that were asked for when it died are given up together."""
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    worker = Worker(daemon)
    loader = Loader(worker.attachment, worker.memory, worker.counts)
    try:
        for number in range(200):
            loader.submit(Load(str(number), chain(0), 0, np.array([[1]], np.int32)), None)
        failed: set[str] = set()
        until(lambda: failed.update(loader.take().failed) or len(failed) == 200)
    finally:
        loader.close()
        worker.attachment.close()


# --- identity ------------------------------------------------------------------------------------


def spec_for(model: Path, load_format: str = "auto", **more: Any) -> KVSpec:
    """What a worker of such an engine calls its blocks."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, **more),
        load_config=LoadConfig(load_format=load_format),
    )
    geometry = Geometry.of(CACHES)
    memory = EngineMemory(geometry, {LAYER: torch.zeros(ENGINE_BLOCKS, 2, BLOCK, SIZE)}, 16)
    return spec_of(config, CACHES, geometry, memory.pages, Settings(), (0, 0))


def test_how_long_a_prompt_may_be_is_part_of_what_a_model_is(tiny: Path) -> None:
    """Some models scale positions or attention by it."""
    short, long = spec_for(tiny, max_model_len=512), spec_for(tiny, max_model_len=1024)
    assert short.digest != long.digest
    assert short.digest == spec_for(tiny, max_model_len=512).digest


def test_weights_from_elsewhere_are_not_told_by_the_folder(tiny: Path) -> None:
    """Tensorizer's lie where a setting of its own says."""
    with pytest.raises(InvalidArgument, match=r"tensorizer.*tierkv\.weights"):
        spec_for(tiny, "tensorizer")
