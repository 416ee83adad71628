"""Compiles the CPU kernel: when the package is built or installed, never at run time.

Also a script that needs nothing but Python: ``python -P kernels/tierkv_kernels/cpu/build.py``.
Without a compiler it says so and succeeds: attention on a CPU then runs on torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "libtierkv_cpu.so"
FLAGS = (
    *("-O3", "-std=gnu11", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"),
)
ONCE = ("levels.c", "pool.c")
PER_LEVEL = ("attention.c", "read.c")

Levels = dict[str, tuple[str, ...]]

_X86_64: Levels = {
    "v2": ("-march=x86-64-v2",),
    "v3": ("-march=x86-64-v3",),
    "v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
}
_OPTIONS_OF_MACHINE: dict[str, Levels] = {"x86_64": _X86_64, "aarch64": {"neon": ()}}


class CannotCompile(Exception):
    """There is no C compiler, or it refuses; the message says which."""


def levels() -> Levels:
    """Instruction sets of this kind of machine, slowest first, with the options to compile for it.

    Raises CannotCompile for a kind that the kernel is not written for.
    """
    machine = platform.machine()
    if machine not in _OPTIONS_OF_MACHINE:
        raise CannotCompile(f"the kernel is for x86_64 and aarch64, this is {machine}")
    return _OPTIONS_OF_MACHINE[machine]


def symbol(function: str, level: str) -> str:
    """The name of one level's function."""
    return f"tierkv_{function}_{level.replace('-', '_')}"


def sources_digest() -> str:
    """Names the sources: a library knows from which it was made."""
    content = hashlib.sha256()
    for source in sorted((HERE / "src").glob("*.[ch]")):
        content.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return content.hexdigest()[:32]


def build(library: Path = LIBRARY, *options: str) -> None:
    """Compile ``library`` with $CC, else cc, and more ``options``. Raises CannotCompile.

    It appears whole or not at all: processes that run on an older one keep that.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    digest = f'-DTIERKV_SOURCES="{sources_digest()}"'
    sources = [(name, name, (digest,)) for name in ONCE] + [
        (f"{level}-{name}", name, (*for_level, f"-DLEVEL={level.replace('-', '_')}"))
        for level, for_level in levels().items()
        for name in PER_LEVEL
    ]
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as scratch:
        objects = [str(Path(scratch, f"{made}.o")) for made, _, _ in sources]
        commands = [
            [*compiler, *FLAGS, *special, *options, "-c", str(HERE / "src" / name), "-o", made]
            for (_, name, special), made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            list(workers.map(_run, commands))
        whole = Path(scratch, library.name)
        _run([*compiler, "-shared", "-pthread", *options, "-o", str(whole), *objects, "-lm"])
        whole.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotCompile(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise CannotCompile(f"{command[0]} failed:\n{done.stderr.strip()}")


def main() -> None:
    """Build in place, or say why not."""
    try:
        build()
    except CannotCompile as error:
        sys.stderr.write(f"attention on a CPU will run on torch, slower: {error}\n")


if __name__ == "__main__":
    main()
