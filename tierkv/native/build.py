"""Compiles the library of hot loops: when the package is built or installed, never at run time.

Also a script that needs nothing but Python: ``python -P tierkv/native/build.py``. Without a
compiler it says so and succeeds: tierkv then runs on its loops in Python.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "libtierkv_native.so"
FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")


class CannotCompile(Exception):
    """There is no C compiler, or it refuses; the message says which."""


def sources() -> list[Path]:
    """The C files, headers included, in order of their names."""
    return sorted((HERE / "src").glob("*.[ch]"))


def sources_digest() -> str:
    """Names the sources: a library knows from which it was made."""
    content = hashlib.sha256()
    for source in sources():
        content.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return content.hexdigest()[:32]


def build(library: Path = LIBRARY, *options: str) -> None:
    """Compile ``library`` with $CC, else cc, and more ``options``. Raises CannotCompile.

    It appears whole or not at all: processes that run on an older one keep that.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    units = [str(source) for source in sources() if source.suffix == ".c"]
    digest = f'-DTIERKV_SOURCES="{sources_digest()}"'
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as scratch:
        made = Path(scratch, library.name)
        command = [*compiler, *FLAGS, *options, digest, "-o", str(made), *units]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CannotCompile(f"{compiler[0]}: {error.strerror}") from error
        if done.returncode:
            raise CannotCompile(f"{compiler[0]} failed:\n{done.stderr.strip()}")
        made.replace(library)


def main() -> None:
    """Build in place, or say why not."""
    try:
        build()
    except CannotCompile as error:
        sys.stderr.write(f"tierkv runs without its native loops, slower: {error}\n")


if __name__ == "__main__":
    main()
