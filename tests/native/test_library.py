"""Building the library, finding it, and what happens without it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from tierkv_kernels.cpu.library import Library

from tierkv.errors import ConfigError
from tierkv.native import build as building
from tierkv.native.build import HERE, CannotCompile, build, sources_digest
from tierkv.native.library import NoLibrary, load
from tierkv.native.loops import loops

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the package's C and its build script, to be changed."""
    return Path(shutil.copytree(HERE, tmp_path / "native", ignore=shutil.ignore_patterns("*.so")))


def script(place: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", place / "build.py"],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_needs_nothing_but_python_and_a_compiler(sources: Path) -> None:
    done = script(sources)
    assert (done.returncode, done.stderr) == (0, "")
    load({}, sources / "libtierkv_native.so")
    assert not list(sources.glob(".*"))


def test_without_a_compiler_the_script_says_so_and_succeeds(sources: Path) -> None:
    done = script(sources, CC="/no/such/compiler")
    assert done.returncode == 0
    assert "without its native loops" in done.stderr
    assert "/no/such/compiler: No such file" in done.stderr
    assert not (sources / "libtierkv_native.so").exists()


def test_a_failed_build_leaves_the_old_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library.so"
    build(library)
    before = library.read_bytes()
    monkeypatch.setenv("CC", "cc -include /no/such/header.h")
    with pytest.raises(CannotCompile, match=r"no/such/header\.h"):
        build(library)
    assert library.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["library.so"]


def test_a_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library.so"
    monkeypatch.setattr(building, "sources_digest", lambda: sources_digest()[::-1])
    build(library)
    with pytest.raises(NoLibrary, match=r"made from other sources: install tierkv again, or make"):
        load({}, library)


def test_what_is_no_library_of_ours_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(NoLibrary, match=r"there is no .*was no C compiler when"):
        load({}, tmp_path / "library.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(NoLibrary, match="cannot load"):
        load({}, tmp_path / "text.so")
    (tmp_path / "empty.c").write_text("int nothing;")
    foreign = tmp_path / "foreign.so"
    subprocess.run(["cc", "-shared", "-o", foreign, tmp_path / "empty.c"], check=True)
    with pytest.raises(NoLibrary, match="another library"):
        load({}, foreign)


def test_the_variable_turns_it_off(tmp_path: Path) -> None:
    with pytest.raises(NoLibrary, match="TIERKV_NATIVE is off") as refused:
        load({"TIERKV_NATIVE": "off"}, tmp_path / "library.so")
    assert refused.value.wanted
    with pytest.raises(ConfigError, match="TIERKV_NATIVE is 'yes'; it may be auto or off"):
        load({"TIERKV_NATIVE": "yes"}, tmp_path / "library.so")


def test_falling_back_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    missing = tmp_path / "library.so"
    monkeypatch.setattr("tierkv.native.loops.load", lambda: load({}, missing))
    loops.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert loops() is loops()
        assert str(missing) in loops().missing
    finally:
        loops.cache_clear()
    (line,) = caplog.messages
    assert "hot loops run in Python" in line
    assert str(missing) in line


@pytest.mark.parametrize("compiler", ["cc", "/no/such/compiler"])
def test_a_wheel_has_the_libraries_if_there_is_a_compiler(tmp_path: Path, compiler: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        env=os.environ | {"CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    native = tmp_path / "tierkv" / "native"
    cpu = tmp_path / "tierkv_kernels" / "cpu"
    assert (native / "src" / "xxh3.c").exists()
    assert (cpu / "src" / "attention.c").exists()
    if compiler == "cc":
        assert "-py3-none-linux_" in wheel.name
        load({}, native / "libtierkv_native.so")
        assert Library(cpu / "libtierkv_cpu.so").levels()
    else:
        assert "built without its native loops" in done.stdout + done.stderr
        assert "built without its attention kernel for CPUs" in done.stdout + done.stderr
        assert wheel.name.endswith("-py3-none-any.whl")
        assert not list(native.glob("*.so"))
        assert not list(cpu.glob("*.so"))


@pytest.mark.timeout(300)
def test_all_works_on_the_loops_in_python() -> None:
    """The suites that use the loops most, in a process that is told not to use C."""
    suites = (
        *("tests/tiers", "tests/client/test_sync.py", "tests/client/test_reading.py"),
        *("tests/client/test_pages.py", "tests/client/test_writing.py"),
        "tests/manager",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *suites],
        cwd=ROOT,
        env=os.environ | {"TIERKV_NATIVE": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
