"""The demo, whole, on a model small enough for a test: real daemon, real kills, real workers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from examples import demo
from examples.demo_daemon import SHM
from examples.smollm2 import TINY

ROOT = Path(__file__).parents[2]
PYTHONPATH = ":".join(str(ROOT / part) for part in (".", "wal", "kernels"))


def folders(pid: int) -> list[Path]:
    """All folders of the process's demos; other demos may run on the host."""
    places = [Path(tempfile.gettempdir()), SHM]
    return [found for place in places for found in place.glob(f"tierkv-demo-{pid}-*")]


def test_every_phase_gives_the_models_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    steps: list[str] = []
    seen_folders: list[Path] = []

    def step(text: str) -> None:
        steps.append(text)
        seen_folders.extend(folders(os.getpid()))

    report = demo.run(model_path=TINY, document_tokens=600, answer_tokens=40, step=step)
    assert [row.phase for row in report.rows if not row.identical] == []
    assert report.ok
    assert len(steps) == demo.STEPS
    cached = {row.phase: row.cached_tokens for row in report.rows}
    assert cached.pop("cold prefill") == 0
    assert len(cached) == 7
    assert min(cached.values()) >= 500
    facts = dict(report.facts)
    assert int(facts["shared by two workers"].split()[0]) >= 500 // 16
    assert facts["recovery"].endswith("0 blocks lost")
    assert seen_folders
    assert not folders(os.getpid())


def test_a_demo_that_is_told_to_stop_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = [sys.executable, "-m", "tierkv", "demo", "--model", TINY, "--tokens", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("- cold"):
                break
        assert folders(running.pid)
        running.terminate()
        assert running.stderr.read().endswith("tierkv: interrupted\n")
    assert running.returncode == 1
    assert not folders(running.pid)
