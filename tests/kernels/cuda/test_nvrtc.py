"""The compiler: how it is found, what it makes, what it says of bad sources."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest
import torch
from tierkv_kernels import BackendUnavailable
from tierkv_kernels.cuda.nvrtc import VARIABLE, Compiled, Nvrtc, Source, Usage, candidates
from tierkv_kernels.errors import CompileError

GOOD = Source(
    "good.cu",
    '#include "value.h"\nextern "C" __global__ void good(float *x) {\n'
    "  __shared__ float room[64];\n"
    "  room[threadIdx.x] = x[threadIdx.x];\n  __syncthreads();\n"
    "  x[threadIdx.x] = room[63 - threadIdx.x] + VALUE;\n}\n",
    {"value.h": "#define VALUE 2.0f\n"},
)
BAD = Source("bad.cu", "__global__ void bad() { nonsense; }", {})


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc.find()


def test_it_is_found_and_says_what_it_knows(nvrtc: Nvrtc) -> None:
    assert nvrtc.version[0] in (12, 13)
    assert {80, 90, 100, 120} <= set(nvrtc.archs())


def test_a_cubin_for_a_device_that_it_knows(nvrtc: Nvrtc) -> None:
    compiled = nvrtc.compile(GOOD, "sm_90")
    assert compiled.image.startswith(b"\x7fELF")
    usage = compiled.usage()["good"]
    assert usage == Usage(usage.registers, 0, 0, static_shared_bytes=256)
    assert 4 <= usage.registers <= 64


def test_ptx_for_a_device_that_is_newer(nvrtc: Nvrtc) -> None:
    compiled = nvrtc.compile(GOOD, "sm_999")
    assert f".target sm_{max(nvrtc.archs())}".encode() in compiled.image
    assert compiled.usage() == {}


@pytest.mark.parametrize(
    ("arch", "message"), [("sm_20", "sm_20 is too old"), ("90", "arch: got '90', want one such")]
)
def test_devices_that_cannot_be_had(nvrtc: Nvrtc, arch: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        nvrtc.compile(GOOD, arch)


def test_an_error_has_the_log(nvrtc: Nvrtc) -> None:
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(BAD, "sm_90")
    assert "bad.cu for sm_90" in str(caught.value)
    assert 'identifier "nonsense" is undefined' in str(caught.value)


def test_spills_are_counted() -> None:
    log = (
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\n"
        "ptxas info    : Function properties for one\n"
        "ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90'\n"
        "ptxas info    : Used 8 registers\n"
    )
    assert Compiled(b"", log).usage() == {"one": Usage(255, 16, 20, 1024), "two": Usage(8, 0, 0, 0)}


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "site-packages"
    library = wheel / "nvidia/cu13/lib/libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr("sys.path", [str(wheel)])
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(candidates({"CUDA_HOME": "/cuda"})) == [
        str(library),
        "/cuda/lib64/libnvrtc.so.13",
        "libnvrtc.so.13",
        "/cuda/lib64/libnvrtc.so.12",
        "libnvrtc.so.12",
    ]
    assert list(candidates({VARIABLE: "mine.so"})) == ["mine.so"]


def test_that_of_a_cuda_build_of_torch_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("sys.path", [])
    assert list(candidates({})) == ["libnvrtc.so.12", "libnvrtc.so.12", "libnvrtc.so.13"]


def test_what_is_asked_for_is_not_replaced() -> None:
    with pytest.raises(BackendUnavailable, match=r"cannot load NVRTC: /nowhere\.so"):
        Nvrtc.find({VARIABLE: "/nowhere.so"})
    with pytest.raises(BackendUnavailable, match=r"is no NVRTC, .* lacks nvrtcVersion"):
        Nvrtc.find({VARIABLE: ctypes.util.find_library("c") or ""})


def test_how_to_get_it_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv_kernels.cuda.nvrtc.candidates", lambda _: iter(()))
    with pytest.raises(BackendUnavailable, match="pip install nvidia-cuda-nvrtc"):
        Nvrtc.find({})
