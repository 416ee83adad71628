"""`make gpu-check` in small, over the stand-in driver and simulated kernels.

It must be right on its first run on a card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tierkv_kernels.cuda import variants

from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check import daemon, peers
from benchmarks.gpu_check.report import Report, read, shown
from tests.kernels.sim.build import library
from tests.service.running import running
from tierkv import KVSpec

ROOT = Path(__file__).parents[2]
PARTS = ("machine", "memory", "kernels", "decode", "peers", "daemon")


def gpu_check(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "wal", "kernels")),
        "OMP_NUM_THREADS": "1",
        **extra,
    }
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def standin(standin_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine whose card is simulated."""
    kernels = tmp_path_factory.mktemp("simulated")
    wanted = [variants.merge(bf16=True, head_dim=64), variants.move()]
    wanted += [
        variants.attention(bf16=True, kv_fp8=False, head_dim=64, row_warps=warps)
        for warps in (1, 4)
    ]
    for variant in wanted:
        (kernels / f"{variant.name}.so").symlink_to(library(variant))
    return {
        "TIERKV_LIBCUDA": str(standin_driver),
        "TIERKV_STANDIN_KERNELS": str(kernels),
        "TIERKV_KERNEL_CACHE": str(tmp_path_factory.mktemp("compiled")),
    }


def findings(result: dict[str, Any], part: str) -> dict[str, Any]:
    return {one["name"]: one for one in result["parts"][part]}


@pytest.mark.timeout(240)
def test_all_of_it(standin: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    said = gpu_check("--tiny", "--device", "cpu", "--out", str(out), **standin)
    assert said.returncode == 0, said.stdout + said.stderr
    result = json.loads(out.read_text())
    assert tuple(result["parts"]) == PARTS
    assert result["not_held"] == []
    assert findings(result, "kernels")["cases"]["computed"] == 1
    assert findings(result, "memory")["and what it writes is seen here"]["ok"]
    assert findings(result, "memory")["64 blocks of 64 KiB in one launch"]["ok"]
    assert findings(result, "daemon")["what it had written is right"]["ok"]
    assert any(name.startswith("gather and SDPA") for name in findings(result, "peers"))
    decode = findings(result, "decode")
    assert decode["read ceiling, sum"]["gb_s"] > 0
    assert decode["a launch"]["host_us"] > 0


@pytest.mark.timeout(120)
def test_what_fails_is_told_and_costs_nothing_else(standin: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    only = [part for name in ("machine", "memory") for part in ("--only", name)]
    broken = {**standin, "TIERKV_STANDIN_FAIL": "cuMemExportToShareableHandle=801"}
    said = gpu_check("--tiny", "--device", "cpu", "--out", str(out), *only, **broken)
    assert said.returncode == 1
    result = json.loads(out.read_text())
    assert result["not_held"] == ["another process reads and writes the same memory"]
    assert "one copy to the host" in findings(result, "memory")
    assert "device" in findings(result, "machine")


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = gpu_check()
    assert said.returncode == 2
    assert said.stderr.startswith("gpu-check needs a GPU: torch")


def test_a_torch_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(program, "LOOK_S", 0.2)
    assert program._no_gpu() == "torch did not find one in 0 s"


def test_a_peer_that_cannot_run_is_no_fault_of_ours() -> None:
    decode: Any = None  # these peers do not look at it

    def refuse() -> torch.Tensor:
        raise RuntimeError("no paged attention in this build")

    def work() -> torch.Tensor:
        return torch.zeros(1)

    why = "cannot run here: RuntimeError: no paged attention in this build"
    assert peers._ready(lambda _: refuse, decode) == (None, why)
    assert peers._ready(lambda _: None, decode) == (None, "not there")
    assert peers._ready(lambda _: work, decode) == (work, "")


def test_attention_through_a_daemon_is_that_of_torch() -> None:
    """On a tier in RAM: over the stand-in it is left out, as torch cannot see that memory."""
    spec = KVSpec(model="m", layers=2, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
    tiers = {"device.bytes": "4MiB", "host.bytes": "0", "disk.bytes": "0"}
    with running(tiers) as served, served.connect() as client:
        assert daemon.attend(client.namespace(spec), "cpu") <= daemon.TOLERANCE


def test_findings_survive_a_torn_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "lines")
    report.add("fine", ok=True, took_s=0.123456)
    with report.trying("broken"):
        raise ValueError("because")
    with report.path.open("a") as file:
        file.write('{"name": "tor')
    found = read(report.path)
    assert [one["name"] for one in found] == ["fine", "broken"]
    assert found[1]["failed"].startswith("ValueError: because (test_gpu_check.py:")
    assert "a torn line" in capsys.readouterr().err
    assert shown(found[0]).split() == ["fine", "holds,", "took_s", "0.1235"]
    assert shown(found[1]).startswith("! broken")
