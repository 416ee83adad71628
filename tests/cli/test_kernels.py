"""``tierkv kernels``: what there is, and compiling ahead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tierkv_kernels.cpu.library import Library

from tierkv.cli.exit_codes import Exit
from tierkv.units import about_bytes

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "kernels"
    monkeypatch.setenv("TIERKV_KERNEL_CACHE", str(directory))
    return directory


@pytest.fixture
def two_devices(standin_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIERKV_LIBCUDA", str(standin_driver))
    monkeypatch.setenv("TIERKV_STANDIN_DEVICES", "2")
    return standin_driver


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_LIBCUDA", "/nowhere/libcuda.so.1")


def test_what_is_there(tierkv: Run, two_devices: Path, cache: Path) -> None:
    code, out, _ = tierkv("kernels", "info")
    assert code == Exit.OK
    lines = {line[:15].strip(): line[15:] for line in out.splitlines()}
    levels = Library().levels()
    assert lines["CPU kernel"] == f"{levels[-1]}, of {', '.join(levels)}"
    assert lines["CUDA driver"] == f"13.0, {two_devices}"
    assert lines["CUDA device 0"] == f"simulated device 0, sm_90, {about_bytes(8 << 30)}"
    assert lines["CUDA device 1"].startswith("simulated device 1")
    assert lines["CUDA compiler"].startswith("NVRTC 1")
    assert lines["CUDA kernels"] == f"0 kernels, {about_bytes(0)}, {cache}"


def test_what_is_missing_says_why(
    tierkv: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_LIBNVRTC", "/nowhere/libnvrtc.so")
    monkeypatch.setenv("TIERKV_ISA", "v5")
    code, out, _ = tierkv("kernels", "info")
    assert code == Exit.OK
    assert "TIERKV_ISA: got 'v5', want one that this CPU has" in out
    assert "no CUDA driver: /nowhere/libcuda.so.1: cannot open" in out
    assert "cannot load NVRTC: /nowhere/libnvrtc.so: cannot open" in out
    assert "CUDA device" not in out


def test_the_same_for_programs(tierkv: Run, two_devices: Path, cache: Path) -> None:
    found = json.loads(tierkv("kernels", "info", "--json")[1])
    levels = Library().levels()
    assert found["cpu"] == {"levels": levels, "level": levels[-1]}
    device = {"arch": "sm_90", "bytes": 8 << 30}
    assert found["cuda"] == {
        "driver": str(two_devices),
        "version": "13.0",
        "devices": [{"name": f"simulated device {i}", **device} for i in range(2)],
    }
    assert "sm_90" in found["nvrtc"]["archs"]
    assert found["cache"] == {
        "directory": str(cache),
        "kernels": 0,
        "bytes": 0,
        "limit_bytes": 256 << 20,
    }


def test_kernels_are_compiled_once(tierkv: Run, no_driver: None, cache: Path) -> None:
    build = ("kernels", "build", "--arch", "sm_80", "--head-dim", "16")
    first = json.loads(tierkv(*build, "--json")[1])
    count = first["sm_80"]["compiled"]
    assert first == {"sm_80": {"compiled": count, "kept": 0}}
    assert len(list(cache.iterdir())) == count > 10
    assert json.loads(tierkv(*build, "--json")[1]) == {"sm_80": {"compiled": 0, "kept": count}}
    code, out, _ = tierkv(*build)
    assert code == Exit.OK
    assert out.splitlines()[1].split() == ["sm_80", "0", str(count)]
    assert f"the cache is {cache}" in out
    info = json.loads(tierkv("kernels", "info", "--json")[1])
    assert info["cache"]["kernels"] == count


def test_without_an_arch_it_is_the_devices(tierkv: Run, two_devices: Path) -> None:
    code, out, _ = tierkv("kernels", "build", "--head-dim", "16", "--json")
    assert code == Exit.OK
    assert list(json.loads(out)) == ["sm_90"]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], Exit.FAILED, "cannot open shared object file: No such file or directory; name an"),
        (["--arch", "90"], Exit.FAILED, "arch: got '90', want one such as sm_90"),
        (["--arch", "sm_20"], Exit.FAILED, "sm_20 is too old: the kernels need sm_80 or newer"),
        (["--head-dim", "1000"], Exit.USAGE, "1000 is not one of 16, 32, 48"),
        (["--arch", "sm_90", "--head-dim", "24"], Exit.USAGE, "24 is not one of 16, 32, 48"),
    ],
)
def test_what_cannot_be_built(
    arguments: list[str], code: Exit, line: str, tierkv: Run, no_driver: None
) -> None:
    got, out, err = tierkv("kernels", "build", *arguments)
    assert (got, out) == (code, "")
    assert line in err
    assert err.count("\n") == 1
