"""The interpreter that a peer's client runs in: made on first use, kept in a cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.catalog import Environment


class Missing(Exception):
    """The peer cannot run here, for this reason."""


def default_cache() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv-peers"


def interpreter(environment: Environment, cache: Path) -> Path:
    """The interpreter; installs what there is to install. Raises Missing."""
    for program in environment.programs:
        if shutil.which(program) is None:
            raise Missing(f"{program} is not on PATH (Debian package {environment.package})")
    for library in environment.libraries:
        try:
            ctypes.CDLL(library)
        except OSError:
            raise Missing(f"no {library} (Debian package {environment.package})") from None
    if not environment.steps:
        return Path(sys.executable)
    pins = repr((sys.version_info[:2], environment.steps)).encode()
    folder = cache / f"{environment.name}-{hashlib.sha256(pins).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {environment.name} into {folder}", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        for step in environment.steps:
            _run([str(python), "-m", "pip", "install", "--quiet", *step])
        ready.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [row for row in done.stderr.splitlines() if row.startswith("ERROR")]
        raise Missing((errors or done.stderr.splitlines() or ["it failed"])[-1][:300])
