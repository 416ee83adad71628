"""The device tier as memory of a GPU, shared with workers: a real daemon over the stand-in driver.

The stand-in's device memory is host memory, so a test can look at what its worker has mapped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import tierkv
from tests.service.blocks import (
    BLOCK,
    SPEC,
    check,
    fill,
    grow,
    held,
    payloads,
    press,
    sized,
    store,
    tokens,
)
from tests.service.running import Daemon, environment, run_cli, running, until
from tierkv.errors import InvalidArgument, LeaseLost, LimitExceeded, Unavailable
from tierkv.gpu import GpuRows

GPU = {"device.kind": "cuda"}


class Seen:
    """A namespace whose pool is shown as the NumPy array that the stand-in's memory is."""

    def __init__(self, ns: tierkv.Namespace) -> None:
        self._ns = ns

    @property
    def pool(self) -> np.ndarray:
        rows = self._ns.pool
        assert isinstance(rows, GpuRows)
        shape = (len(rows), rows.stride)
        memory = (ctypes.c_ubyte * (shape[0] * shape[1])).from_address(rows.address)
        return np.frombuffer(memory, np.uint8).reshape(shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ns, name)


def seen(client: tierkv.Client, spec: tierkv.KVSpec = SPEC) -> Any:
    return Seen(client.namespace(spec))


@pytest.fixture
def driver(standin_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of daemons, and this process's own, with a stand-in driver of this test's.

    Other tests count what is left in theirs.
    """
    own = str(shutil.copy(standin_driver, tmp_path / "own.so"))
    monkeypatch.setenv("TIERKV_LIBCUDA", own)
    return {"TIERKV_LIBCUDA": own}


@pytest.fixture
def daemon(driver: dict[str, str]) -> Iterator[Daemon]:
    """Small tiers of 16, 16 and 64 blocks."""
    with running(sized(16, 16, 64, **GPU), extra=driver) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[tierkv.Client]:
    with daemon.connect() as client:
        yield client


@pytest.fixture
def ns(client: tierkv.Client) -> Any:
    return seen(client)


def test_a_prefix_moves_down_and_up_again(ns: Any, client: tierkv.Client) -> None:
    ids = tokens(8, seed=100)
    store(ns, ids)
    for found in ((8, 0, 0), (0, 8, 0), (0, 0, 8)):
        assert ns.lookup(ids)[:4] == (8 * BLOCK, *found)
        with ns.begin(ids, keep=0) as sequence:
            check(ns, sequence)
            assert sequence.cached_from == (8 * BLOCK, *found)
        press(client, ns, 16 if found[0] else 32, seed=1000 * sum(found[1:]) + 5000 * found[1])


def test_more_sequences_than_fit_are_suspended_and_come_back(ns: Any) -> None:
    sequences = []
    for seed in range(3):
        sequences.append(fill(ns, tokens(8, seed=seed)))
        sequences[-1].suspend()
    for seed, sequence in enumerate(sequences):
        sequence.resume()
        check(ns, sequence)
        assert np.array_equal(sequence.tokens, tokens(8, seed=seed))
        sequence.suspend()


def test_a_tail_that_was_shared_is_copied_on_the_gpu(ns: Any) -> None:
    ids = tokens(3, seed=7)[: 2 * BLOCK + 5]
    sequence = ns.begin(ids, keep=0)
    sequence.reserve(len(ids))
    ns.pool[sequence.block_table, : SPEC.block_bytes] = 1
    ns.pool[sequence.block_table[2], : SPEC.block_bytes] = 77
    sequence.append(ids)
    other = sequence.fork()
    for one in (sequence, other):
        one.reserve(1)
    assert sequence.block_table[2] != other.block_table[2]
    assert (held(sequence, ns)[2] == 77).all()
    assert (held(other, ns)[2] == 77).all()


def test_blocks_go_in_and_out_by_copy(ns: Any, client: tierkv.Client) -> None:
    ids = tokens(6, seed=20)
    data = payloads(SPEC, ids)
    assert ns.write(ids, data) == 6
    out = np.zeros_like(data)
    assert ns.read(ids, out) == 6
    assert np.array_equal(out, data)
    press(client, ns, 16, seed=4000)
    out[:] = 0
    assert ns.read(ids, out) == 6
    assert np.array_equal(out, data)

    sequence = ns.begin(tokens(2, seed=21), keep=0, reserve=0)
    assert sequence.write_blocks(0, data[:2]) == 2
    sequence.append(tokens(2, seed=21))
    assert sequence.read_blocks(0, out[:2]) == 2
    assert np.array_equal(out[:2], data[:2])


def test_a_block_that_rots_on_the_gpu_is_a_miss(driver: dict[str, str]) -> None:
    """It is not copied before it rots: blocks go down when they are evicted only."""
    settings = sized(16, 16, 64, **GPU, **{"disk.write": "demote"})
    with running(settings, extra=driver) as daemon, daemon.connect() as client:
        ns, ids = seen(client), tokens(4, seed=30)
        sequence = fill(ns, ids)
        ns.pool[sequence.block_table[2], 100] ^= 1
        sequence.end()
        for seed in range(8):
            store(ns, tokens(4, seed=6000 + seed))
        with ns.begin(ids, keep=0) as sequence:
            assert sequence.num_tokens == 2 * BLOCK
            check(ns, sequence)


def test_torch_and_others_are_told_where_the_slots_lie(ns: Any, daemon: Daemon) -> None:
    rows = ns._ns.pool
    told = rows.__cuda_array_interface__
    assert told["shape"] == (16, SPEC.block_bytes)
    assert told["data"] == (rows.address, False)
    assert daemon.status()["tiers"]["device"]["blocks"] == 0


def test_the_daemon_does_not_compute_there(ns: Any, bystander_of: Any) -> None:
    import torch

    with bystander_of(ns), fill(ns, tokens(2, seed=40)) as sequence:
        q = torch.zeros(1, SPEC.kv_heads, SPEC.head_dim)
        with pytest.raises(InvalidArgument, match="the device tier is on a GPU"):
            ns.attention(0, q, [sequence], where="daemon")


def test_blocks_of_one_size_only(ns: Any, client: tierkv.Client, bystander_of: Any) -> None:
    with bystander_of(ns), pytest.raises(LimitExceeded, match="another state directory"):
        client.namespace(replace(SPEC, layers=3))


@pytest.fixture
def bystander_of(daemon: Daemon) -> Any:
    """A sequence that is whole, and can grow, after what goes on beside it."""

    @contextmanager
    def watch(ns: Any) -> Iterator[None]:
        pid = daemon.pid
        with fill(ns, tokens(3, seed=1)) as sequence:
            yield
            check(ns, sequence)
            grow(ns, sequence, tokens(1, seed=2))
            assert daemon.pid == pid
            assert daemon.process is not None
            assert daemon.process.poll() is None

    return watch


def test_workers_share_what_lies_there(ns: Any, daemon: Daemon) -> None:
    ids = tokens(6, seed=95)
    with fill(ns, ids) as mine, daemon.connect("other") as other:
        theirs = seen(other)
        with theirs.begin(ids, keep=0) as sequence:
            check(theirs, sequence)
            assert np.array_equal(sequence.block_table, mine.block_table)
            assert theirs.pool.ctypes.data != ns.pool.ctypes.data
            rest = tokens(1, seed=96)
            grow(theirs, sequence, rest)
        with ns.begin(np.concatenate([ids, rest]), keep=0) as longer:
            assert longer.cached_tokens == 7 * BLOCK
            check(ns, longer)


def test_a_killed_worker_leaves_what_it_sealed(ns: Any, daemon: Daemon) -> None:
    """In a process of its own, which maps the memory, seals, writes on, and is killed."""
    ids = tokens(4, seed=97)
    script = (
        "import os, sys; from tests.service.test_gpu_tier import seen;"
        "from tests.service.blocks import fill, tokens; import tierkv;"
        "ns = seen(tierkv.connect(sys.argv[1])); held = fill(ns, tokens(4, seed=97));"
        "held.reserve(16); ns.pool[held.block_table[4]] = 7; os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(daemon.socket)]
    extra = {"TIERKV_LIBCUDA": os.environ["TIERKV_LIBCUDA"]}
    assert subprocess.run(command, env=environment(extra), check=False).returncode == -9
    until(lambda: len(daemon.status()["workers"]) == 1, "for the killed worker's lease")
    with ns.begin(ids, keep=0) as sequence:
        assert sequence.cached_from == (4 * BLOCK, 4, 0, 0)
        check(ns, sequence)


def test_what_lay_on_the_gpu_is_gone_with_the_daemon(driver: dict[str, str]) -> None:
    with running(sized(16, 16, 64, **GPU), extra=driver) as daemon, daemon.connect() as client:
        ns = seen(client)
        ids = tokens(8, seed=50)
        sequence = fill(ns, ids)
        client.flush()
        lost = fill(ns, tokens(2, seed=51)[: 2 * BLOCK - 3])
        kept, old, slots = ns._ns.pool, ns.pool, sequence.block_table
        daemon.signal(9)
        daemon.wait()
        daemon.start()
        with pytest.raises(LeaseLost):
            lost.reserve(1)
        # The new daemon has new memory. What the worker still uses of the old is as it was.
        assert ns.pool.ctypes.data != kept.address
        assert np.array_equal(old[slots, : SPEC.block_bytes], payloads(SPEC, ids))
        with ns.begin(ids, keep=0) as sequence:
            assert sequence.cached_from[2:] == (0, 8)
            check(ns, sequence)
        assert daemon.stop() == 0, daemon.said()


def test_a_worker_keeps_no_memory_from_the_next_daemon(driver: dict[str, str]) -> None:
    live_objects = ctypes.CDLL(driver["TIERKV_LIBCUDA"]).standin_live_objects
    with running(sized(16, 16, 64, **GPU), extra=driver) as daemon:
        with tierkv.connect(daemon.socket, reconnect_s=0.5) as client:
            ns, ids = seen(client), tokens(4, seed=52)
            sequence = fill(ns, ids)
            client.flush()
            assert live_objects() > 0
            daemon.signal(9)
            daemon.wait()
            with pytest.raises(Unavailable):
                sequence.reserve(16)
            assert live_objects() == 0
            with pytest.raises(Unavailable, match="the memory of its GPU"):
                sequence.read_blocks(0, payloads(SPEC, ids))
            daemon.start()
            with pytest.raises(LeaseLost):
                sequence.reserve(16)
            with ns.begin(ids, keep=0) as sequence:
                check(ns, sequence)
                assert sequence.cached_tokens == 4 * BLOCK
        assert daemon.stop() == 0, daemon.said()


def test_a_repair_needs_no_gpu(driver: dict[str, str]) -> None:
    with running(sized(16, 16, 64, **GPU), extra=driver) as daemon:
        with daemon.connect() as client:
            store(seen(client), tokens(4, seed=61))
            client.flush()
        daemon.signal(9)
        daemon.wait()
        (segment,) = (daemon.state / "data").glob("*.seg")
        with segment.open("r+b") as file:
            file.seek(4096 + 100)  # in the payload of the first slot
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        larger = ("--set", f"device.bytes={1 << 50}")  # than any machine's memory
        said = run_cli("verify", "--deep", "--repair", *daemon.flags, *larger)
        assert "put right" in said.stdout, said
        daemon.start()
        with daemon.connect() as client, fill(seen(client), tokens(4, seed=61)) as sequence:
            assert sequence.cached_tokens < 4 * BLOCK
        assert daemon.stop() == 0, daemon.said()


def test_a_stop_loses_nothing(driver: dict[str, str]) -> None:
    with running(sized(16, 0, 64, **GPU), extra=driver) as daemon:
        with daemon.connect() as client:
            store(seen(client), tokens(8, seed=60))
        assert daemon.stop() == 0, daemon.said()
        daemon.start()
        with daemon.connect() as client, fill(seen(client), tokens(8, seed=60)) as sequence:
            assert sequence.cached_tokens == 8 * BLOCK


@pytest.mark.parametrize(
    "call", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventSynchronize"]
)
def test_a_gpu_that_fails_ends_the_daemon(driver: dict[str, str], call: str) -> None:
    broken = {**driver, "TIERKV_STANDIN_FAIL": f"{call}=700"}
    settings = sized(16, 16, 64, **GPU)
    with Daemon(settings, extra=broken) as daemon:
        daemon.start()
        with tierkv.connect(daemon.socket, reconnect_s=1.0) as client:
            ns, ids = seen(client), tokens(8, seed=70)
            with suppress(Unavailable):
                store(ns, ids)
                client.flush(timeout_s=1)
                for seed in range(8):
                    store(ns, tokens(4, seed=seed))
                ns.begin(ids, keep=0)
            assert daemon.wait() == 74
        assert f"the GPU failed, stopping at once: cannot copy blocks of the GPU: {call}" in (
            daemon.said()
        )


@pytest.mark.parametrize(
    ("more", "environ", "status", "said"),
    [
        ({}, {"TIERKV_LIBCUDA": "/nowhere.so"}, 78, "no CUDA driver"),
        ({}, {"TIERKV_STANDIN_DEVICES": "0"}, 78, "CUDA_ERROR_NO_DEVICE"),
        ({"device.index": "3"}, {}, 78, "there is no GPU 3; this process sees 1"),
        ({"device.bytes": "1GiB"}, {"TIERKV_STANDIN_BYTES": "100000000"}, 1, "lower device.bytes"),
        ({}, {"TIERKV_STANDIN_FAIL": "cuMemExportToShareableHandle=801"}, 1, "NOT_SUPPORTED"),
        ({"device.bytes": "auto"}, {}, 78, "write how much memory of the GPU"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    driver: dict[str, str], more: dict[str, str], environ: dict[str, str], status: int, said: str
) -> None:
    with Daemon({**sized(16, 16, 64, **GPU), **more}, extra={**driver, **environ}) as daemon:
        daemon.launch()
        assert daemon.wait() == status, daemon.said()
        assert said in daemon.said()


def test_a_worker_that_does_not_see_the_gpu(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_LIBCUDA", "/nowhere.so")
    with pytest.raises(Unavailable, match=r"cannot be mapped here: no CUDA driver"):
        daemon.connect()
    until(lambda: daemon.process is not None and daemon.process.poll() is None)


def test_the_host_tier_is_pinned_while_it_serves(driver: dict[str, str]) -> None:
    pinned = {**GPU, "arena.prefault": "on"}
    with running(sized(16, 16, 64, **pinned), extra=driver) as daemon, daemon.connect() as client:
        ns, ids = seen(client), tokens(8, seed=80)
        store(ns, ids)
        until(lambda: "the host tier is pinned" in daemon.said(), "for the pinned host tier")
        press(client, ns, 16, seed=8000)
        assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 8, 0)
        with ns.begin(ids, keep=0) as sequence:
            check(ns, sequence)
            assert sequence.cached_tokens == 8 * BLOCK
        assert daemon.stop() == 0, daemon.said()


def test_a_host_tier_that_cannot_be_pinned(driver: dict[str, str]) -> None:
    environ = {**driver, "TIERKV_STANDIN_FAIL": "cuMemHostRegister_v2=2"}
    pinned = {**GPU, "arena.prefault": "on"}
    with running(sized(16, 16, 64, **pinned), extra=environ) as daemon, daemon.connect() as client:
        ns, ids = seen(client), tokens(8, seed=90)
        store(ns, ids)
        until(lambda: "copies take longer" in daemon.said(), "for the warning")
        press(client, ns, 16, seed=9000)
        with ns.begin(ids, keep=0) as sequence:
            check(ns, sequence)
        assert daemon.stop() == 0, daemon.said()
