"""Runs commands in this process, away from the machine's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tierkv.cli.main import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory, a configuration and a log of the test's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("TIERKV_CONFIG", str(tmp_path / "empty.toml"))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def tierkv(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs ``tierkv ARGUMENTS``."""

    def run(*arguments: str) -> Result:
        code = main(arguments)
        return Result(code, *capsys.readouterr())

    return run
