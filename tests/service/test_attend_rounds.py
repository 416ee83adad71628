"""Requests for attention that arrive together: computed together, and nobody harms anybody.

The daemon's threads compute only while a gate is open, so that a test decides what waits.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.service.raw import Peer
from tests.service.running import Daemon, environment, running, until
from tierkv import KVSpec
from tierkv.errors import InvalidArgument
from tierkv.rpc import messages as m
from tierkv.service.attend_compute import Computer
from tierkv.service.attend_queue import TABLE_ENTRIES_MAX, Job, Kind

SPEC = KVSpec(model="a", layers=2, kv_heads=2, head_dim=32, block_tokens=8)
Q_HEADS = 4
DEVICE_BLOCKS = 128
OUT, LSE = 1 << 20, 2 << 20

GATED = """
'''Stands before torch: attention is computed while the gate is open.'''
import sys, time
from pathlib import Path
here = str(Path(__file__).parent)
sys.path.remove(here)
del sys.modules["torch"]
import torch
import tierkv_kernels
compute = tierkv_kernels.paged_attention
def gated(*arguments, **options):
    Path(here, "waits").touch()
    while not Path(here, "open").exists():
        time.sleep(0.002)
    return compute(*arguments, **options)
tierkv_kernels.paged_attention = gated
"""


class Gate:
    """What stands between a round and its computation."""

    def __init__(self, folder: Path) -> None:
        folder.joinpath("torch.py").write_text(GATED)
        self.folder = folder
        self._open, self._waits = folder / "open", folder / "waits"
        self.open()

    def open(self) -> None:
        self._open.touch()

    def close(self) -> None:
        self._open.unlink(missing_ok=True)
        self._waits.unlink(missing_ok=True)

    def until_somebody_waits(self) -> None:
        until(self._waits.exists, "for a round")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def served(gate: Gate) -> Iterator[Daemon]:
    path = os.pathsep.join([str(gate.folder), environment()["PYTHONPATH"]])
    settings = {
        "device.bytes": str(DEVICE_BLOCKS * SPEC.block_bytes),
        "host.bytes": "0",
        "disk.bytes": "0",
    }
    with running(settings, extra={"PYTHONPATH": path}) as daemon:
        yield daemon


@pytest.fixture
def daemon(served: Daemon, gate: Gate) -> Iterator[Daemon]:
    yield served
    gate.open()
    until(lambda: served.metrics()["tierkv_leases"] == 0, "for all workers to be gone")


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


class Worker(Peer):
    """A peer with one sequence of random K and V, and a random query in its scratch memory."""

    def __init__(self, daemon: Daemon, tokens: int, *, rows: int = 1, salt: str = "") -> None:
        super().__init__(daemon)
        self.hello()
        spec = msgspec.structs.replace(SPEC, salt=salt)
        opened = self.want(m.OpenNamespace(spec, spec.digest), m.NamespaceOpened)
        self.want(m.Acquire(opened.namespace, 1, b"", b""), m.Table)
        table = self.want(m.Reserve(1, 0, tokens), m.Table)
        self.slots = np.frombuffer(table.slots, "<u4")
        chance = np.random.default_rng(tokens)
        with mmap.mmap(self.fds[0], self.opening.arena_bytes) as arena:
            for slot in self.slots.tolist():
                at = opened.slot_offset + slot * opened.slot_stride
                values = chance.standard_normal(SPEC.block_bytes // 4, np.float32)
                arena[at : at + SPEC.block_bytes] = values.tobytes()
        self.scratch = mmap.mmap(self.fds[2], self.opening.scratch_bytes)
        query = chance.standard_normal(rows * Q_HEADS * SPEC.head_dim, np.float32)
        self.scratch[: query.nbytes] = query.tobytes()
        self.query_bytes = query.nbytes
        self.request = m.Attend(
            *(opened.namespace, 0, [1], u32(tokens), u32(0, rows), Q_HEADS, 0, OUT, LSE)
        )

    def post(self, message: m.Message) -> int:
        """Send, and wait for no reply; returns the request's number."""
        self._last_id += 1
        self.send(self._last_id, message)
        return self._last_id

    def ask_for_attention(self, **changes: Any) -> int:
        """Send the request; when this returns, the daemon has it."""
        request_id = self.post(msgspec.structs.replace(self.request, **changes))
        self.meanwhile()
        return request_id

    def meanwhile(self) -> None:
        """Something that the daemon answers whatever its attention does."""
        number = self.post(m.Lookup(self.request.namespace, b""))
        assert self.receive() == (number, m.Found(0, 0, 0, 0))

    def result(self) -> bytes:
        """Output and sums as they lie in the scratch memory now."""
        sums = self.query_bytes // SPEC.head_dim
        return self.scratch[OUT : OUT + self.query_bytes] + self.scratch[LSE : LSE + sums]

    def forget_result(self) -> None:
        self.scratch[OUT : LSE + (1 << 20)] = bytes(LSE + (1 << 20) - OUT)

    def close(self) -> None:
        self.scratch.close()
        super().close()


class Rounds:
    """How many rounds and requests there were since."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        metrics = self._daemon.metrics()
        name = "tierkv_attend_batch_requests"
        return metrics[f"{name}_count"], metrics[f"{name}_sum"]

    def since(self) -> tuple[int, int]:
        """Rounds, and requests in them."""
        (rounds, requests), (rounds_then, requests_then) = self._now(), self._before
        return int(rounds - rounds_then), int(requests - requests_then)


@pytest.fixture
def workers(daemon: Daemon) -> Iterator[list[Worker]]:
    """Sequences of several lengths, prefill among them, and a tenant of its own."""
    found = [
        Worker(daemon, 9),
        Worker(daemon, 1),
        Worker(daemon, 200, rows=3),
        Worker(daemon, 64, salt="tenant"),
        Worker(daemon, 17, rows=17),
    ]
    yield found
    for worker in found:
        worker.close()


def answered(worker: Worker, request_id: int) -> None:
    assert worker.receive() == (request_id, m.Done())


def test_requests_that_wait_are_computed_together(
    daemon: Daemon, gate: Gate, workers: list[Worker]
) -> None:
    alone = []
    for worker in workers:
        worker.want(worker.request, m.Done)
        alone.append(worker.result())
        assert any(alone[-1])
        worker.forget_result()
    gate.close()
    rounds = Rounds(daemon)
    asked = [(workers[0], workers[0].ask_for_attention())]
    gate.until_somebody_waits()
    asked += [(worker, worker.ask_for_attention()) for worker in workers[1:]]
    gate.open()
    for worker, request_id in asked:
        answered(worker, request_id)
    assert rounds.since() == (2, len(workers))
    assert [worker.result() for worker in workers] == alone, "bit for bit"
    assert daemon.metrics()["tierkv_attend_wait_seconds_count"] >= 2 * len(workers)


def test_only_requests_of_one_kind_are_computed_together(
    daemon: Daemon, gate: Gate, workers: list[Worker]
) -> None:
    gate.close()
    rounds = Rounds(daemon)
    asked = [workers[0].ask_for_attention()]
    gate.until_somebody_waits()
    changes: list[dict[str, Any]] = [{"layer": 1}, {"softcap": 3.0}, {"layer": 1}, {"window": 4}]
    for worker, changed in zip(workers[1:], changes, strict=True):
        asked.append(worker.ask_for_attention(**changed))
    gate.open()
    for worker, request_id in zip(workers, asked, strict=True):
        answered(worker, request_id)
    assert rounds.since() == (4, 5)


def test_a_bad_request_is_refused_while_others_wait(
    daemon: Daemon, gate: Gate, workers: list[Worker]
) -> None:
    gate.close()
    rounds = Rounds(daemon)
    asked = [workers[0].ask_for_attention(), workers[1].ask_for_attention()]
    workers[2].refused(msgspec.structs.replace(workers[2].request, layer=7), "invalid_argument")
    gate.open()
    for worker, request_id in zip(workers, asked, strict=False):
        answered(worker, request_id)
    assert rounds.since() == (2, 2)


def test_more_requests_than_a_connection_may_have_unanswered_wait_in_its_socket(
    daemon: Daemon, gate: Gate
) -> None:
    with Worker(daemon, 30) as worker:
        gate.close()
        asked = [worker.post(worker.request) for _ in range(200)]
        gate.until_somebody_waits()
        gate.open()
        found = [worker.receive() for _ in asked]
        assert sorted(one[0] for one in found if one) == asked
        assert all(one[1] == m.Done() for one in found if one)


def test_a_table_that_is_too_large_is_refused(daemon: Daemon) -> None:
    with Worker(daemon, 100 * SPEC.block_tokens) as worker:
        count = TABLE_ENTRIES_MAX // 100 + 1
        many = msgspec.structs.replace(
            worker.request,
            sequences=[1] * count,
            seq_lens=u32(*[100 * SPEC.block_tokens] * count),
            q_indptr=u32(*[0] * count, 1),
        )
        failure = worker.refused(many, "limit_exceeded")
        assert failure.details == {"limit": TABLE_ENTRIES_MAX, "asked": 100 * count}
        worker.want(worker.request, m.Done)


# --- workers that go, and blocks that must not ----------------------------------------------------


def leases(daemon: Daemon) -> int:
    return int(daemon.metrics()["tierkv_leases"])


def free_blocks(daemon: Daemon) -> int:
    """Blocks of the device tier that are free."""
    return round(daemon.metrics()['tierkv_free_block_ratio{tier="device"}'] * DEVICE_BLOCKS)


def test_what_a_worker_that_died_has_waited_for_is_not_computed(daemon: Daemon, gate: Gate) -> None:
    with Worker(daemon, 9) as first, Worker(daemon, 80) as second:
        gate.close()
        rounds = Rounds(daemon)
        asked = first.ask_for_attention()
        gate.until_somebody_waits()
        second.ask_for_attention()
        second.close()
        until(lambda: leases(daemon) == 1, "for the lease to end, whatever attention does")
        assert free_blocks(daemon) == DEVICE_BLOCKS - 2
        gate.open()
        answered(first, asked)
        assert rounds.since() == (1, 1)


def test_blocks_of_a_worker_that_died_go_to_nobody_while_attention_reads_them(
    daemon: Daemon, gate: Gate
) -> None:
    with Worker(daemon, 1) as other, Worker(daemon, 80) as dying:
        gate.close()
        dying.ask_for_attention()
        gate.until_somebody_waits()
        dying.close()
        until(lambda: daemon.metrics()["tierkv_connections"] == 1, "for the daemon to know")
        everything = m.Reserve(1, 0, DEVICE_BLOCKS * SPEC.block_tokens)
        failure = other.refused(everything, "pool_exhausted")
        assert failure.details["free"] == DEVICE_BLOCKS - 1 - 10
        assert leases(daemon) == 2
        gate.open()
        until(lambda: leases(daemon) == 1, "for the lease to end")
        other.want(everything, m.Table)


@pytest.mark.parametrize(
    "verb",
    [
        m.Release([1]),
        m.Truncate(1, 0),
        m.Suspend(1),
        m.Reserve(1, 0, 8),
        m.Store(0, 1, 2, 0, b"", b"", b""),
    ],
    ids=lambda verb: type(verb).__name__,
)
def test_a_worker_lets_go_of_blocks_when_attention_has_read_them(
    daemon: Daemon, gate: Gate, verb: m.Message
) -> None:
    with Worker(daemon, 80) as worker:
        gate.close()
        attend = worker.ask_for_attention()
        gate.until_somebody_waits()
        if isinstance(verb, m.Store):
            verb = msgspec.structs.replace(verb, namespace=worker.request.namespace)
        letting_go = worker.post(verb)
        worker.meanwhile()
        assert free_blocks(daemon) == DEVICE_BLOCKS - 10
        gate.open()
        answered(worker, attend)
        found = worker.receive()
        assert found is not None
        assert found[0] == letting_go
        assert not isinstance(found[1], m.Failure)


def test_other_sequences_can_be_let_go_of_meanwhile(daemon: Daemon, gate: Gate) -> None:
    with Worker(daemon, 80) as worker:
        worker.want(m.Acquire(worker.request.namespace, 2, b"", b""), m.Table)
        gate.close()
        attend = worker.ask_for_attention()
        gate.until_somebody_waits()
        worker.want(m.Reserve(2, 0, 8), m.Table)
        worker.want(m.Release([2]), m.Done)
        gate.open()
        answered(worker, attend)


def test_a_daemon_that_is_told_to_stop_ends_its_round(gate: Gate, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    with running(extra={"PYTHONPATH": path}) as daemon, Worker(daemon, 9) as worker:
        gate.close()
        worker.ask_for_attention()
        gate.until_somebody_waits()
        worker.ask_for_attention()
        daemon.signal(15)
        assert worker.receive() is None
        gate.open()
        assert daemon.wait() == 0, daemon.said()


def test_steps_of_other_lengths_or_options_are_planned_anew(
    daemon: Daemon, workers: list[Worker]
) -> None:
    """The same request before and after others: its plan may be kept, theirs must not be used."""
    worker = workers[3]
    wanted = {}
    for changes in ({}, {"layer": 1}, {"window": 5}, {"seq_lens": u32(63)}, {"causal": False}) * 2:
        request = msgspec.structs.replace(worker.request, **changes)
        worker.want(request, m.Done)
        found = wanted.setdefault(str(changes), worker.result())
        assert worker.result() == found
    assert len(set(wanted.values())) == 4, "one query sees the same keys, causal or not"


def test_a_long_prefill_needs_no_memory_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 512
    plans = []

    def compute(*arguments: Any, plan: Any, **options: Any) -> tuple[Any, None]:
        plans.append(plan)
        return options["out"], None

    monkeypatch.setattr("tierkv_kernels.paged_attention", compute)
    job = Job(
        kind=Kind(0, 2, 2, 32, 8, "float32", "NHD", 0, Q_HEADS, 0.0, True, -1, 0.0),
        tables=np.arange(blocks, dtype=np.uint32)[None],
        seq_lens=np.array([8 * blocks], np.uint32),
        q_indptr=np.array([0, 1000], np.uint32),
        pool=np.zeros((blocks, SPEC.block_bytes), np.uint8),
        scratch=mmap.mmap(-1, 2 << 20),
        q_offset=0,
        out_offset=1 << 20,
        lse_offset=0,
    )
    assert Computer().run([job]) == [None]
    assert [plan.num_partials for plan in plans] == [0]


# --- a round that fails ---------------------------------------------------------------------------


def test_only_those_of_a_round_fail_that_would_fail_alone() -> None:
    kind = Kind(0, 2, 2, 32, 8, "float32", "NHD", 0, Q_HEADS, 0.0, True, -1, 0.0)
    chance = np.random.default_rng(0)
    pool = chance.standard_normal((4, SPEC.block_bytes // 4), np.float32).view(np.uint8)

    def job(slot: int, scratch_bytes: int = 1 << 13) -> Job:
        table, lens = np.array([[slot]], np.uint32), np.array([8], np.uint32)
        scratch = mmap.mmap(-1, scratch_bytes)
        query = chance.standard_normal(Q_HEADS * SPEC.head_dim, np.float32)
        scratch[: query.nbytes] = query.tobytes()
        bounds = np.array([0, 1], np.uint32)
        return Job(kind, table, lens, bounds, pool, scratch, 0, 1024, 2048)

    jobs = [job(0), job(1, scratch_bytes=1024), job(9), job(3)]
    run = Computer().run
    first, second, third, fourth = run(jobs)
    assert first is None
    assert fourth is None
    assert isinstance(second, InvalidArgument)
    assert isinstance(third, InvalidArgument)
    assert "block_table" in third.message
    for good in (jobs[0], jobs[3]):
        together = good.scratch[1024:4096]
        assert any(together)
        good.scratch[1024:4096] = bytes(3072)
        assert run([good]) == [None]
        assert good.scratch[1024:4096] == together
