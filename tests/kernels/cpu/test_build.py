"""Building the CPU kernel, finding it, picking a level, and what happens without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from attention_cases import Shape, check_output, make_batch
from backends import levels_here
from tierkv_kernels import (
    BackendUnavailable,
    InvalidInput,
    attention,
    backends,
    cpu,
    paged_attention,
)
from tierkv_kernels.cpu import Kernel
from tierkv_kernels.cpu import build as building
from tierkv_kernels.cpu.build import HERE, CannotCompile, build, sources_digest
from tierkv_kernels.cpu.library import Library, choose_level

QUICK = ("-O0",)
"""Options for a library that is not to be fast."""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the C and its build script, to be changed."""
    return Path(shutil.copytree(HERE, tmp_path / "cpu", ignore=shutil.ignore_patterns("*.so")))


def script(place: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", place / "build.py"],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_was_built() -> None:
    assert levels_here(), "no library: run kernels/tierkv_kernels/cpu/build.py"


@pytest.mark.timeout(300)
def test_the_script_needs_nothing_but_python_and_a_compiler(sources: Path) -> None:
    done = script(sources)
    assert (done.returncode, done.stderr) == (0, "")
    assert Library(sources / "libtierkv_cpu.so").levels() == levels_here()
    assert not list(sources.glob(".*"))


def test_without_a_compiler_the_script_says_so_and_succeeds(sources: Path) -> None:
    done = script(sources, CC="/no/such/compiler")
    assert done.returncode == 0
    assert "attention on a CPU will run on torch" in done.stderr
    assert "/no/such/compiler: No such file" in done.stderr
    assert not (sources / "libtierkv_cpu.so").exists()


def test_a_failed_build_leaves_the_old_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library.so"
    library.write_text("old")
    monkeypatch.setenv("CC", "cc -include /no/such/header.h")
    with pytest.raises(CannotCompile, match=r"no/such/header\.h"):
        build(library)
    assert library.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["library.so"]


def test_another_kind_of_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building.platform, "machine", lambda: "riscv64")
    with pytest.raises(CannotCompile, match="for x86_64 and aarch64, this is riscv64"):
        build(tmp_path / "library.so")


def test_a_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library.so"
    with monkeypatch.context() as other:
        other.setattr(building, "sources_digest", lambda: sources_digest()[::-1])
        build(library, *QUICK)
    with pytest.raises(
        BackendUnavailable, match=r"made from other sources; to build it: .*build\.py"
    ):
        Library(library)


def test_what_is_no_library_of_ours_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"was not compiled .*; to build it: install a C"):
        Library(tmp_path / "library.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(BackendUnavailable, match="cannot load"):
        Library(tmp_path / "text.so")


def test_the_fastest_level_is_taken_unless_one_is_named() -> None:
    library = Library()
    assert choose_level(library, {}) == library.levels()[-1]
    for level in library.levels():
        assert choose_level(library, {"TIERKV_ISA": level}) == level
        assert Kernel(level).level == level
    with pytest.raises(InvalidInput, match="TIERKV_ISA: got 'v9', want one that this CPU has: v2"):
        choose_level(library, {"TIERKV_ISA": "v9"})


def test_a_machine_without_any_level_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(library, "levels", list)
    with pytest.raises(BackendUnavailable, match="needs one of v2, v3, v4, v4-bf16; this CPU has"):
        choose_level(library, {})


def test_without_the_library_torch_computes_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> Kernel:
        return Kernel(library=Library(tmp_path / "library.so"))

    for module in (attention, backends):
        monkeypatch.setattr(module, "default_kernel", missing)
    backends.cpu_kernel_if_there.cache_clear()
    batch = make_batch(Shape(lengths=((20, 1), (9, 3)), head_dim=64))
    try:
        with pytest.warns(UserWarning, match="attention on the CPU runs on torch, slower: .*build"):
            out, _ = paged_attention(*batch.tensors, **batch.options)
        check_output(batch, out, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again, _ = paged_attention(*batch.tensors, **batch.options)
        assert torch.equal(out, again)
        with pytest.raises(BackendUnavailable, match="was not compiled"):
            paged_attention(*batch.tensors, **batch.options, backend="cpu")
    finally:
        backends.cpu_kernel_if_there.cache_clear()


def test_the_process_has_one_kernel() -> None:
    assert cpu.default_kernel() is cpu.default_kernel()
    assert cpu.default_kernel().threads == len(os.sched_getaffinity(0))
