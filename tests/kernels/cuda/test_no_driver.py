"""Machines without a CUDA driver, or with something else in its place."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest
from tierkv_kernels import BackendUnavailable
from tierkv_kernels.cuda.driver import DEFAULT_PATH, VARIABLE, Driver


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "libcuda.so.1")
    with pytest.raises(BackendUnavailable, match=f"no CUDA driver: {missing}"):
        Driver(missing)


def test_another_library_is_named_with_what_it_lacks() -> None:
    libc = ctypes.util.find_library("c")
    with pytest.raises(BackendUnavailable, match=rf"the CUDA driver {libc} .* lacks cuInit"):
        Driver(libc)


def test_the_environment_names_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.so"))
    with pytest.raises(BackendUnavailable, match=r"mine\.so"):
        Driver()
    monkeypatch.delenv(VARIABLE)
    assert DEFAULT_PATH == "libcuda.so.1"
