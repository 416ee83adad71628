"""The example runs, and its later turns find the document."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from examples.demo_daemon import DemoDaemon

ROOT = Path(__file__).parents[3]


def chat(*arguments: str, question: str = "") -> list[tuple[int, int]]:
    """Run it; of every turn, how many tokens were cached of how many."""
    path = os.pathsep.join(str(ROOT / part) for part in ("", "wal", "kernels"))
    sizes = ("--document-tokens", "200", "--answer-tokens", "8")
    ran = subprocess.run(
        [sys.executable, "-m", "examples.transformers_chat", *sizes, *arguments],
        env={**os.environ, "PYTHONPATH": path, "TIERKV_SOCKET": "/nonexistent"},
        input=question,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ("No daemon runs here" in ran.stdout) == ("--socket" not in arguments)
    found = re.findall(r"\[(\d+) of (\d+) prompt tokens cached", ran.stdout)
    return [(int(cached), int(prompt)) for cached, prompt in found]


def test_it_starts_a_daemon_where_there_is_none(smollm2: Path) -> None:
    turns = chat("--turns", "2")
    assert turns[0][0] == 0
    assert turns[1][0] >= turns[0][1] // 16 * 16


def test_it_uses_the_daemon_that_runs(smollm2: Path, daemon: DemoDaemon) -> None:
    """A person asks, and ends the chat by an empty line."""
    turns = chat("--chat", "--socket", daemon.socket, question="What is it?\nWhy?\n\nIgnored\n")
    assert [cached > 0 for cached, _ in turns] == [False, True]
