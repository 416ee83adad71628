"""Compiles a kernel for the simulator: one library for each variant, kept under build/."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tierkv_kernels.cuda.images import FILE_OF, SOURCES, options_of
from tierkv_kernels.cuda.variants import Variant

ROOT = Path(__file__).parents[3]
SIMULATOR = ROOT / "kernels" / "sim"
KEPT = ROOT / "build" / "cusim"

FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-DTKV_SIM", "-Wall", "-Wextra", "-Werror")
KERNEL_FLAGS = ("-Wno-unknown-pragmas",)  # the device's compiler is told to unroll
FAST = ("-O2",)
SANITIZED = (
    "-O1",
    "-g",
    "-DCUSIM_UCONTEXT",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover",
)


class CannotCompile(Exception):
    """What the compiler says."""


def compiler() -> list[str] | None:
    """$CXX, else g++; None where there is none."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    return command if shutil.which(command[0]) else None


def library(
    variant: Variant,
    *,
    options: Sequence[str] = FAST,
    macros: Sequence[str] = (),
    sources: Path = SOURCES,
) -> Path:
    """The variant's library, compiled if need be. macros: as -D options."""
    given = [option.replace("--define-macro=", "-D") for option in options_of(variant)]
    return library_of(
        sources / FILE_OF[variant.kernel],
        options=options,
        macros=(*given, *macros),
        sources=sources,
    )


def library_of(
    kernel: Path,
    *,
    options: Sequence[str] = FAST,
    macros: Sequence[str] = (),
    sources: Path = SOURCES,
) -> Path:
    """The library of a file of kernels."""
    flags = (*FLAGS, *options, f"-I{SIMULATOR}")
    machine = [
        _compiled(SIMULATOR / name, (*flags, f"-I{SOURCES}"), SOURCES)
        for name in ("cusim.cc", "numbers.cc")
    ]
    own = (*flags, f"-I{sources}", *KERNEL_FLAGS, *macros)
    objects = [*machine, _compiled(kernel, own, sources)]
    return _made("so", ["-shared", *options, *map(str, objects)], objects)


def _compiled(source: Path, flags: Sequence[str], sources: Path) -> Path:
    headers = sorted([*sources.glob("*.*h"), *SIMULATOR.glob("*.h")])
    return _made("o", [*flags, "-x", "c++", "-c", str(source)], [source, *headers])


def _made(kind: str, arguments: Sequence[str], inputs: Sequence[Path]) -> Path:
    """What the compiler makes of the inputs, under a name that tells all of them."""
    command = compiler()
    assert command, "no C++ compiler"
    content = hashlib.sha256(repr((command, arguments)).encode())
    for path in inputs:
        content.update(hashlib.sha256(path.read_bytes()).digest())
    made = KEPT / f"{content.hexdigest()[:24]}.{kind}"
    if not made.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
            fresh = Path(scratch, made.name)
            done = subprocess.run(
                [*command, *arguments, "-o", str(fresh)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise CannotCompile(done.stderr)
            fresh.replace(made)
    return made
