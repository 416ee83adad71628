"""A whole daemon with its device tier on the card, and a worker that writes by torch.

Needs what tierkv itself needs (msgspec, lmdb, xxhash and so on); skipped where that is not there.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.options import MIB, Options
from benchmarks.gpu_check.report import Report

NEEDED = ("aiofiles", "click", "lmdb", "msgspec", "prometheus_client", "rich", "xxhash")
BLOCKS = 32
TOLERANCE = 2e-2
"""Of outputs in bfloat16; the kernels part holds them against float64."""


def run(report: Report, options: Options) -> None:
    """Write, seal, spill, bring up, kill, restart."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        report.add("daemon", skipped=f"not installed: {', '.join(missing)}")
        return
    with tempfile.TemporaryDirectory(prefix="tierkv-gpu-") as folder:
        daemon = Daemon(Path(folder), options)
        try:
            _lives(report, options, daemon)
        except Exception:
            print(daemon.said()[-3000:])
            raise
        finally:
            daemon.kill()


class Daemon:
    """``tierkv serve`` in a folder of its own; its arena files lie there, too."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.socket = folder / "s"
        self._log = folder / "log"
        self._settings = {
            "server.state_dir": folder / "state",
            "server.socket": self.socket,
            "metrics.tcp": "",
            "metrics.socket": folder / "m",
            "arena.dir": folder / "arenas",
            "arena.prefault": "on",
            "device.kind": "cuda",
            "device.bytes": options.pick(512 * MIB, 8 * MIB),
            "host.bytes": options.pick(256 * MIB, 4 * MIB),
            "disk.bytes": options.pick(2048 * MIB, 64 * MIB),
            "disk.segment_bytes": options.pick(256 * MIB, 16 * MIB),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it; seconds until it serves."""
        given = [
            part for key, value in self._settings.items() for part in ("--set", f"{key}={value}")
        ]
        began = time.perf_counter()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierkv", "serve", *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TIERKV_CONFIG": os.devnull},
            )
        while not self._serves():
            if self.process.poll() is not None:
                raise RuntimeError(f"the daemon ended: {self.said()[-600:]}")
        return time.perf_counter() - began

    def _serves(self) -> bool:
        import tierkv
        from tierkv.errors import Unavailable

        try:
            tierkv.connect(self.socket, timeout_s=1).close()
        except Unavailable as error:
            if "cannot be mapped here" in error.message:
                raise
            return False
        return True

    def kill(self) -> None:
        """At once, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop(self) -> int:
        """Let it end by itself; its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def said(self) -> str:
        """Its log."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _lives(report: Report, options: Options, daemon: Daemon) -> None:
    import tierkv

    report.add("daemon serves", took_s=daemon.start())
    spec = tierkv.KVSpec(
        model="gpu-check",
        layers=options.pick(32, 2),
        kv_heads=8,
        head_dim=options.pick(128, 16),
        block_tokens=16,
        dtype="bfloat16",
        vocab_size=50_000,
    )
    blocks = options.pick(BLOCKS, 8)
    ids = np.random.default_rng(0).integers(0, 50_000, blocks * 16).astype(np.uint32)
    with tierkv.connect(daemon.socket, reconnect_s=60) as client:
        ns = client.namespace(spec)
        content = _written(report, options, ns, ids)
        if options.device == "cuda":
            with report.trying("attention to what was written"):
                apart = attend(ns, "cuda")
                report.add("attention to what was written", ok=apart <= TOLERANCE, apart=apart)
        client.flush()
        _press(ns, 2 * options.pick(512, 8) * MIB // spec.block_bytes)
        found = ns.lookup(ids)
        report.add("the prefix was spilled", ok=found.device == 0, host=found.host, disk=found.disk)
        began = time.perf_counter()
        with ns.begin(ids, keep=0) as sequence:
            took_s = time.perf_counter() - began
            report.add(
                "and comes up again",
                ok=_same(options, ns, sequence, content),
                gb_s=blocks * spec.block_bytes / took_s / 1e9,
            )
        client.flush()
        daemon.kill()
        report.add("a killed daemon serves again", took_s=daemon.start())
        with ns.begin(ids, keep=0) as sequence:
            report.add("what it had written is right", ok=_same(options, ns, sequence, content))
    report.add("it stops when told", ok=daemon.stop() == 0)


def attend(ns: Any, device: str) -> float:
    """Write keys and values through the worker's API; its attention, how far from torch's own."""
    heads, dim, tokens, group = ns.spec.kv_heads, ns.spec.head_dim, 5 * ns.spec.block_tokens + 3, 4
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    k, v = (torch.randn(tokens, heads, dim, **kind) for _ in range(2))
    q = torch.randn(2, heads * group, dim, **kind)
    last = ns.spec.layers - 1
    with ns.begin([], keep=0, reserve=tokens) as sequence:
        ns.write_kv(last, sequence, 0, k, v)
        sequence.append(np.arange(tokens))
        out = ns.attention(last, q, [sequence], causal=False)
    k, v = (one.repeat_interleave(group, 1).transpose(0, 1) for one in (k, v))
    want = scaled_dot_product_attention(q.transpose(0, 1), k, v).transpose(0, 1)
    return (out.float() - want.float()).abs().max().item()


def _written(report: Report, options: Options, ns: Any, ids: Any) -> Any:
    """Fill the blocks: by torch on the card, where torch can; what they hold, as bytes."""
    rows, size = len(ids) // ns.spec.block_tokens, ns.spec.block_bytes
    content = np.random.default_rng(1).integers(0, 256, (rows, size), np.uint8)
    sequence = ns.begin(ids, keep=0, reserve=0)
    if options.device == "cuda":
        slots = torch.tensor(sequence.block_table, device="cuda", dtype=torch.long)
        pool = torch.as_tensor(ns.pool, device="cuda")
        pool[slots, :size] = torch.from_numpy(content).to("cuda")
    else:
        sequence.write_blocks(0, content)
    sequence.append(ids)
    report.add("blocks are written on the card", ok=_same(options, ns, sequence, content))
    sequence.end()
    return content


def _same(options: Options, ns: Any, sequence: Any, content: Any) -> bool:
    size, table = ns.spec.block_bytes, sequence.block_table
    if len(table) != len(content):
        return False
    out = np.zeros_like(content)
    sequence.read_blocks(0, out)
    same = np.array_equal(out, content)
    if options.device == "cuda":
        slots = torch.tensor(table, device="cuda", dtype=torch.long)
        seen = torch.as_tensor(ns.pool, device="cuda")[slots, :size]
        same &= torch.equal(seen.cpu(), torch.from_numpy(content))
    return same


def _press(ns: Any, blocks: int) -> None:
    """So many other blocks, so that the first ones leave the card."""
    random, at_once = np.random.default_rng(2), 8
    data = random.integers(0, 256, (at_once, ns.spec.block_bytes), np.uint8)
    for _ in range(0, blocks, at_once):
        ids = random.integers(0, 50_000, at_once * ns.spec.block_tokens).astype(np.uint32)
        ns.write(ids, data)
