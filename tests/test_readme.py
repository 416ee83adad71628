"""The README is true: its client example is the one in examples/, and it runs as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A user with a daemon that was started by `tierkv serve` with no configuration at all."""
    home = Path(tempfile.mkdtemp(prefix="tkv-"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "wal", "kernels")),
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "TIERKV_SERVER__STATE_DIR": str(home / "state"),
        "TIERKV_SERVER__SOCKET": str(home / "tierkv.sock"),
        "TIERKV_METRICS__TCP": "",
        "TIERKV_SOCKET": str(home / "tierkv.sock"),
    }
    daemon = subprocess.Popen([sys.executable, "-m", "tierkv", "serve"], env=environment)
    try:
        deadline = time.monotonic() + 20
        while not (home / "tierkv.sock").exists():
            assert daemon.poll() is None, "the daemon ended"
            assert time.monotonic() < deadline, "the daemon does not listen"
            time.sleep(0.02)
        yield environment
    finally:
        daemon.terminate()
        daemon.wait()
        for arena in _arenas(home / "state"):
            shutil.rmtree(arena, ignore_errors=True)
        shutil.rmtree(home)


def _arenas(state_dir: Path) -> list[Path]:
    from tierkv.config.resolve import resolve, this_environment
    from tierkv.config.schema import Config, Server

    config = resolve(Config(server=Server(state_dir=str(state_dir))), this_environment())
    return [Path(config.arena.dir)]


def test_the_client_example_runs_as_written(environment: dict[str, str]) -> None:
    blocks = re.findall(r"```python\n(import tierkv\n.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    assert blocks[0] == (ROOT / "examples" / "quickstart.py").read_text()
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, "-c", blocks[0]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in README


def test_the_pages_it_links_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}: " in makefile


def test_it_names_every_command() -> None:
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", README), command
    for command in re.findall(r"^tierkv (\w+)", README, re.MULTILINE):
        assert command in COMMANDS


def test_the_kernels_example_runs_as_written() -> None:
    (example,) = re.findall(
        r"```python\n(import.*?)```", (ROOT / "kernels" / "README.md").read_text(), re.DOTALL
    )
    found: dict[str, object] = {}
    exec(example, found)
    assert str(getattr(found["out"], "shape", None)) == "torch.Size([5, 9, 64])"
