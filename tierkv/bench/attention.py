"""Paged attention on all cores, against reading the same memory and against what else there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from tierkv_kernels import BackendUnavailable

from tierkv.bench.bars import Bar, Reaches
from tierkv.bench.harness import (
    F64,
    MICROSECONDS,
    MILLISECONDS,
    Bench,
    Line,
    Measured,
    Sample,
    each_call,
    gigabytes_per_s,
)
from tierkv.bench.paged import Shape, Task, compiled_flex

OURS = "tierkv"
READ = "reading the same blocks"
GATHER, GATHER_ROWS = "gather + SDPA", "gather + SDPA, groups as rows"
FLEX = "flex_attention, contiguous"
TORCH, LAYER = "torch backend", "attention of one layer"
DENSE, DENSE_ROWS = "SDPA, contiguous", "SDPA, contiguous, groups as rows"

READ_SHARE, GATHER_TIMES, FLEX_TIMES = 0.8, 8, 1
SETTLE_S = 0.01
"""After a variant its threads may spin for a while; the next one waits for them to sleep."""

TYPES = {
    "fp32": ("float32", "float32"),
    "bf16": ("bfloat16", "bfloat16"),
    "fp16": ("float16", "float16"),
    "fp8": ("bfloat16", "float8_e4m3fn"),
}
"""Of query and output, and of K and V."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}

Variant = Callable[[], Sample]


class PeerMissing(Exception):
    """The peer cannot do it here, for this reason."""


@dataclass(frozen=True)
class Peer:
    """Somebody else's kernel. ``start`` makes a task, and returns its output and what repeats it.

    ``start`` raises PeerMissing. ``times``: what ours has to reach of it, by type; none for a type:
    it is only shown.
    """

    name: str
    start: Callable[[Shape], tuple[torch.Tensor, Callable[[int], F64]]]
    times: Mapping[str, float] = field(default_factory=dict)


def run(bench: Bench) -> Iterator[Line]:
    """What needs nothing but torch."""
    yield from lines(bench, (), flex=False)


def lines(
    bench: Bench,
    peers: Sequence[Peer],
    *,
    flex: bool,
    wanted: Callable[[str], bool] = lambda _name: True,
) -> Iterator[Line]:
    """All lines whose name is wanted. ``flex``: also against flex_attention, slow to compile."""
    measurements: dict[str, Callable[[], Line]] = {}
    for kind, layout in product(TYPES, ("NHD", "HND")):
        name = f"attention.decode.{kind}.{layout.lower()}"
        measurements[name] = partial(_decode, bench, name, kind, layout, peers, flex=flex)
    for batch, context in ((1, 512), (1, 4096), (8, 512), (64, 512)):
        name = f"attention.batch.{batch}.{context}"
        measurements[name] = partial(_batch, bench, name, batch, context)
    for queries in (19, 512):
        name = f"attention.extend.{queries}"
        measurements[name] = partial(_extend, bench, name, queries)
    measurements["attention.call"] = partial(_call, bench, "attention.call")
    measurements["attention.plan"] = partial(_plan, bench, "attention.plan")
    threads = torch.get_num_threads()
    torch.set_num_threads(len(bench.cpus))
    try:
        with torch.no_grad():
            for name, measure in measurements.items():
                if wanted(name):
                    yield measure()
    finally:
        torch.set_num_threads(threads)


def _decode(
    bench: Bench, name: str, kind: str, layout: str, peers: Sequence[Peer], *, flex: bool
) -> Line:
    """One query each of 8 sequences: the whole of K and V is read once."""
    asked = kind in ("fp32", "bf16")
    task = Task(_shape(bench, kind, batch=8, context=4096, layout=layout))
    read, ceiling = _ceiling(task)
    variants = {
        OURS: _timed(task.paged, 5),
        read: _timed(ceiling, 5),
        GATHER: _timed(lambda: task.gather_and_attend(rows=False), 1),
        GATHER_ROWS: _timed(lambda: task.gather_and_attend(rows=True), 1),
    }
    _check(task, task.paged(), task.gather_and_attend(rows=True))
    notes = []
    if flex and asked:
        try:
            compiled = compiled_flex(task)
        except Exception as error:  # whatever its compiler says
            notes.append(f"no flex_attention: {str(error).splitlines()[0][:80]}")
        else:
            _check(task, task.paged(), compiled())
            variants[FLEX] = _timed(compiled, 1)
    for peer in peers if asked else ():
        try:
            result, calls = peer.start(task.shape)
        except PeerMissing as reason:
            notes.append(f"no {peer.name}: {reason}")
        else:
            _check(task, task.paged(), result.to(task.q.dtype))
            variants[peer.name] = _settled(partial(calls, 5))
    measured = bench.interleave(bench.all_cores, variants)
    return measured.line(
        name,
        gigabytes_per_s(task.shape.kv_bytes),
        OURS,
        [one for one in variants if one != OURS],
        bench.all_cores,
        bars=_bars(measured, variants, kind, peers) if asked else (),
        note="; ".join([f"{task.shape.kv_bytes / 1e6:.0f} MB", *notes]),
    )


def _bars(
    measured: Measured, variants: Mapping[str, Variant], kind: str, peers: Sequence[Peer]
) -> list[Bar]:
    """Those whose reference was measured; of the two ways to gather the faster one counts."""
    gather = min((GATHER, GATHER_ROWS), key=lambda name: sum(measured.seconds(name)))
    bars: list[Bar] = [Reaches(READ_SHARE, READ)] if READ in variants else []
    bars.append(Reaches(GATHER_TIMES, gather))
    if FLEX in variants:
        bars.append(Reaches(FLEX_TIMES, FLEX))
    there = [peer for peer in peers if peer.name in variants and kind in peer.times]
    return [*bars, *(Reaches(peer.times[kind], peer.name) for peer in there)]


def _batch(bench: Bench, name: str, batch: int, context: int) -> Line:
    """Smaller tasks, where what is done once a call counts."""
    task = Task(_shape(bench, "bf16", batch=batch, context=context, layout="NHD"))
    read, ceiling = _ceiling(task)
    calls = bench.pick(30, 3)
    measured = bench.interleave(
        bench.all_cores,
        {
            OURS: _timed(task.paged, calls),
            read: _timed(ceiling, calls),
            GATHER_ROWS: _timed(lambda: task.gather_and_attend(rows=True), bench.pick(5, 1)),
        },
    )
    references = [read, GATHER_ROWS]
    return measured.line(name, MICROSECONDS, OURS, references, bench.all_cores)


def _extend(bench: Bench, name: str, queries: int) -> Line:
    """A prompt's last tokens over a cached prefix."""
    shape = _shape(bench, "bf16", batch=1, context=2048, layout="NHD")
    task = Task(replace(shape, queries=queries, context=shape.context + queries))
    k, v = task.gathered()
    _check(task, task.paged(), task.attend(k, v, rows=False))
    calls = bench.pick(5, 1)
    measured = bench.interleave(
        bench.all_cores,
        {
            OURS: _timed(task.paged, calls),
            TORCH: _timed(lambda: task.paged("torch"), calls),
            DENSE: _timed(lambda: task.attend(k, v, rows=False), calls),
            DENSE_ROWS: _timed(lambda: task.attend(k, v, rows=True), calls),
        },
    )
    references = [TORCH, DENSE, DENSE_ROWS]
    return measured.line(name, MILLISECONDS, OURS, references, bench.all_cores)


def _call(bench: Bench, name: str) -> Line:
    """What a call costs that has nothing to do."""
    task = Task(Shape(1, 16, kv_heads=1, q_heads=1, head_dim=64))
    k, v = task.gathered()
    calls = bench.pick(2000, 20)
    measured = bench.interleave(
        bench.all_cores,
        {
            OURS: _timed(task.paged, calls),
            DENSE: _timed(lambda: task.attend(k, v, rows=False), calls),
        },
    )
    return measured.line(name, MICROSECONDS, OURS, [DENSE], bench.all_cores)


def _plan(bench: Bench, name: str) -> Line:
    """What a plan costs, which is made once a step, against a call of one of its layers."""
    task = Task(_shape(bench, "bf16", batch=64, context=512, layout="NHD"))
    measured = bench.interleave(
        bench.all_cores,
        {
            OURS: _timed(task.made_plan, bench.pick(500, 5)),
            LAYER: _timed(task.paged, bench.pick(20, 2)),
        },
    )
    return measured.line(name, MICROSECONDS, OURS, [LAYER], bench.all_cores)


def _shape(bench: Bench, kind: str, *, batch: int, context: int, layout: str) -> Shape:
    dtype, kv_dtype = TYPES[kind]
    size = (bench.pick(batch, 2), bench.pick(context, 64))
    return Shape(*size, dtype=dtype, kv_dtype=kv_dtype, layout=layout)


def _ceiling(task: Task) -> tuple[str, Callable[[], object]]:
    """Reading all of the task's blocks, by all cores, and doing nothing with them."""
    try:
        task.read()
    except BackendUnavailable:
        return "torch's sum of the same blocks", task.layer.contiguous().view(torch.int32).sum
    return READ, task.read


def _timed(call: Callable[[], object], count: int) -> Variant:
    return _settled(lambda: each_call(call, count))


def _settled(variant: Variant) -> Variant:
    def run() -> Sample:
        time.sleep(SETTLE_S)
        return variant()

    return run


def _check(task: Task, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises AssertionError if it is another attention. fp8 is compared in the query's type."""
    tolerance = TOLERANCE[task.shape.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
