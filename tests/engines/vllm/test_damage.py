"""Whatever lies in the store that is not this prompt's KV of this model: a miss, never an answer.

And what is missed is stored again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.full_disk import SmallDisk
from tests.engines.vllm.checks import blocks, hits_all, same, stored, until
from tests.engines.vllm.conftest import TIERS, Truth
from tests.engines.vllm.engine import Engine, Engines, ask
from tests.engines.vllm.models import llama, lora
from tests.engines.vllm.prompts import cacheable, distinct_blocks, family, prompt
from tests.service.running import Daemon, running

PROMPTS = family(200, [5, 60, 130], 50)
ASKS = [ask(tokens) for tokens in PROMPTS]
BLOCKS = distinct_blocks(PROMPTS)
PAGE = 4096


def flip(path: Path, every: int) -> None:
    """Turn one bit in every so-many-th page of a file, in the pages that hold something."""
    with path.open("r+b") as file:
        for number, at in enumerate(range(0, path.stat().st_size, PAGE)):
            page = os.pread(file.fileno(), PAGE, at)
            if number % every == 0 and any(page):
                os.pwrite(file.fileno(), bytes([page[100] ^ 4]), at + 100)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 64 // PAGE * PAGE)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda path: flip(path, 1), id="a bit in every page"),
        pytest.param(lambda path: flip(path, 61), id="a bit in some pages"),
        pytest.param(cut, id="cut off"),
        pytest.param(lambda path: os.truncate(path, 0), id="empty"),
    ],
)
def test_harmed_disk(
    engines: Engines, tiny: Path, truth: Truth, daemon: Daemon, harm: Callable[[Path], None]
) -> None:
    with engines.start(tiny, daemon) as engine:
        same(engine.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        with daemon.connect() as client:
            client.flush()
        assert daemon.stop() == 0, daemon.said()
        for path in daemon.arenas.iterdir():  # so that only the disk is left
            path.unlink() if path.is_file() else shutil.rmtree(path)
        segments = [path for path in (daemon.state / "data").rglob("*") if path.is_file()]
        assert sum(path.stat().st_blocks for path in segments) > 0
        for path in segments:
            harm(path)
        daemon.start()
        reattached(engine)
        engine.forget()
        missed = engine.generate(ASKS)
        same(missed, truth(ASKS))
        most = [cacheable(tokens) for tokens in PROMPTS]
        # A block that is found damaged only when it is loaded was a hit until then.
        failed = engine.call("metrics").get("vllm:tierkv_failed_load_blocks", 0)
        assert sum(answer.cached for answer in missed) < sum(most) or failed, "no block was harmed"

        def repaired() -> bool:
            engine.forget()
            answers = engine.generate(ASKS)
            same(answers, truth(ASKS))
            return [answer.cached for answer in answers] == most

        until(repaired, lambda: engine.said()[-3000:])
        metrics = daemon.metrics()
        found = metrics['tierkv_checksum_failures_total{tier="disk"}']
        dropped = daemon.status()["recovery"]["dropped_blocks"]
        errors = metrics["tierkv_disk_read_errors_total"]
        assert found + dropped + errors > 0, "a miss that nobody counted"


def reattached(engine: Engine) -> None:
    """Wait until the engine uses the daemon again."""
    token = iter(range(1000))

    def hit() -> bool:
        tokens = prompt(70, 5000 + next(token))
        engine.generate([ask(tokens, max_tokens=1)])
        engine.call("idle", 0.05)
        engine.forget()
        return engine.generate([ask(tokens, max_tokens=1)])[0].cached > 0

    until(hit, lambda: engine.said()[-3000:])


def test_new_weights_in_the_same_place(
    engines: Engines, truth: Truth, daemon: Daemon, tmp_path: Path
) -> None:
    model = llama(tmp_path / "model")
    with engines.start(model, daemon) as engine:
        same(engine.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        engine.kill()
    llama(model, seed=9)
    with engines.start(model, enable_prefix_caching=False) as plain:
        new_truth = plain.generate(ASKS)
    with pytest.raises(AssertionError):
        same(new_truth, truth(ASKS))
    with engines.start(model, daemon) as engine:
        same(engine.generate(ASKS), new_truth)
        assert engine.external_hits() == 0
        stored(daemon, 2 * BLOCKS)
        engine.forget()
        answers = engine.generate(ASKS)
        same(answers, new_truth)
        hits_all(answers, ASKS)
        engine.kill()
    llama(model)
    with engines.start(model, daemon) as engine:
        answers = engine.generate(ASKS)
        same(answers, truth(ASKS))
        hits_all(answers, ASKS)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
        {"hf_overrides": {"rms_norm_eps": 0.1}},
    ],
    ids=["dtype", "block size", "rope", "norm"],
)
def test_other_settings(
    engines: Engines,
    tiny: Path,
    truth: Truth,
    two_daemons: tuple[Daemon, Engine],
    changes: dict[str, Any],
) -> None:
    """An engine that computes other values finds nothing; and then what it stored itself."""
    daemon, _ = two_daemons
    before = blocks(daemon)
    ordered = (
        engines.order(tiny, enable_prefix_caching=False, **changes),
        engines.order(tiny, daemon, **changes),
    )
    with ordered[0].ready() as plain, ordered[1].ready() as engine:
        expected = plain.generate(ASKS)
        answers = engine.generate(ASKS)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        assert engine.external_hits() == 0
        until(lambda: blocks(daemon) > before, lambda: engine.said()[-3000:])
        engine.call("idle", 0.2)
        engine.forget()
        answers = engine.generate(ASKS)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        assert engine.external_hits() > 0


@pytest.fixture(scope="module")
def two_daemons(engines: Engines, tiny: Path, truth: Truth) -> Any:
    """A daemon that holds what an engine with the usual settings computed."""
    with running(TIERS) as daemon, engines.start(tiny, daemon) as engine:
        same(engine.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        yield daemon, engine


def test_other_salts(two_daemons: tuple[Daemon, Engine], truth: Truth) -> None:
    daemon, engine = two_daemons
    for salt in ("one", "two"):
        salted = [ask(asked["tokens"], salt=salt) for asked in ASKS]
        before, held = engine.external_hits(), blocks(daemon)
        engine.forget()
        same(engine.generate(salted), truth(ASKS))
        assert engine.external_hits() == before, "another tenant's blocks were served"
        stored(daemon, held + BLOCKS)
        engine.forget()
        answers = engine.generate(salted)
        same(answers, truth(ASKS))
        hits_all(answers, salted)


def test_adapters(engines: Engines, tiny: Path, daemon: Daemon, tmp_path: Path) -> None:
    """The base model, two adapters, and new weights in one of the adapters' places."""
    folders = {name: lora(tmp_path / name, seed=seed) for seed, name in enumerate("ab", 60)}
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 4}

    def asks(name: str | None) -> list[dict[str, Any]]:
        adapter = None if name is None else (name, ord(name), str(folders[name]))
        return [ask(tokens, lora=adapter) for tokens in PROMPTS]

    def one_by_one(engine: Engine) -> None:
        for name in (None, "a", "b"):
            before, held = engine.external_hits(), blocks(daemon)
            same(engine.generate(asks(name)), expected[name])
            assert engine.external_hits() == before, f"{name} was served another's blocks"
            stored(daemon, held + BLOCKS)
        for name in ("b", None, "a"):
            engine.forget()
            answers = engine.generate(asks(name))
            same(answers, expected[name])
            hits_all(answers, asks(name))

    def compute() -> dict[str | None, Any]:
        with engines.start(tiny, enable_prefix_caching=False, **settings) as plain:
            return {name: plain.generate(asks(name)) for name in (None, "a", "b")}

    expected = compute()
    assert len({str(answers) for answers in expected.values()}) == 3
    with engines.start(tiny, daemon, **settings) as engine:
        one_by_one(engine)
        engine.kill()
    with engines.start(tiny, daemon, **settings) as engine:
        answers = engine.generate(asks("a"))
        same(answers, expected["a"])
        hits_all(answers, asks("a"))
        engine.kill()

    lora(folders["a"], seed=70)
    old, expected = expected, compute()
    assert old["a"] != expected["a"]
    with engines.start(tiny, daemon, **settings) as engine:
        same(engine.generate(asks("a")), expected["a"])
        assert engine.external_hits() == 0, "an adapter's old weights were served"


def test_full_disk(engines: Engines, tiny: Path, truth: Truth) -> None:
    """The RAM tiers go on, and once there is room, the disk does as well."""
    more = [ask(tokens, max_tokens=2) for tokens in family(64, [500] * 12, 53)]
    with SmallDisk("tmpfs", 8 << 20) as disk:
        settings = {
            **TIERS,
            "disk.dir": str(disk.path / "data"),
            "disk.bytes": "6MiB",
            "disk.segment_bytes": "1MiB",
        }
        with running(settings) as daemon, engines.start(tiny, daemon) as engine:
            same(engine.generate(ASKS), truth(ASKS))
            stored(daemon, BLOCKS)
            disk.fill_up()
            same(engine.generate(more), truth(more))
            until(lambda: daemon.status()["tiers"]["disk"]["state"] != "ok", daemon.said)
            for asks in (ASKS, more):
                engine.forget()
                answers = engine.generate(asks)
                same(answers, truth(asks))
                hits_all(answers, asks)
            disk.make_room()
            until(lambda: daemon.status()["tiers"]["disk"]["state"] == "ok", daemon.said)
            engine.forget()
            answers = engine.generate(ASKS)
            same(answers, truth(ASKS))
            hits_all(answers, ASKS)
            daemon.stop()


def test_a_store_smaller_than_the_work(engines: Engines, tiny: Path, truth: Truth) -> None:
    """Blocks are evicted while others load and save."""
    asks = [ask(tokens, max_tokens=3) for tokens in family(96, [200, 210, 220, 400] * 6, 54)]
    small = {"device.bytes": "2MiB", "host.bytes": "1MiB", "disk.bytes": "1MiB"}
    settings = {**TIERS, **small, "disk.segment_bytes": "1MiB"}
    with running(settings) as daemon, engines.start(tiny, daemon) as engine:
        for _ in range(3):
            engine.forget()
            same(engine.generate(asks), truth(asks))
        few = asks[:2]
        engine.generate(few)
        engine.call("idle", 0.2)
        engine.forget()
        answers = engine.generate(few)
        same(answers, truth(few))
        assert sum(answer.cached for answer in answers) > 0
