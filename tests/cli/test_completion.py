"""``tierkv completion`` in the shell that it is for."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tierkv.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A shell that finds this checkout's tierkv."""
    command = tmp_path / "bin" / "tierkv"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tierkv "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "wal", "kernels"))
    return {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": paths, "HOME": "/"}


def completed(environment: dict[str, str], words: list[str]) -> list[str]:
    """What bash offers for the last of these words."""
    script = (
        'eval "$(tierkv completion bash)"\n'
        "function_of=$(complete -p tierkv | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        f"COMP_WORDS=({' '.join(words)!s})\n"
        f"COMP_CWORD={len(words) - 1}\n"
        '"$function_of" tierkv\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(environment: dict[str, str]) -> None:
    assert completed(environment, ["tierkv", "''"]) == list(COMMANDS)
    assert completed(environment, ["tierkv", "sta"]) == ["status", "stat"]
    assert completed(environment, ["tierkv", "status", "--wa"]) == ["--watch"]
    assert completed(environment, ["tierkv", "completion", "z"]) == ["zsh"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_lines_of_its_own(tierkv: Run, shell: str) -> None:
    code, out, err = tierkv("completion", shell)
    assert (code, err) == (0, "")
    assert f"_TIERKV_COMPLETE={shell}_complete" in out


def test_another_shell_is_a_usage_error(tierkv: Run) -> None:
    assert tierkv("completion", "csh")[0] == 2
