"""The package is cheap to import: heavy libraries come with the first use of a name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tierkv_kernels


def run_python(code: str) -> str:
    """Run code in a fresh interpreter that sees this one's path."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    loaded = run_python("import tierkv_kernels; print(*sys.modules)").split()
    assert "tierkv_kernels" in loaded
    assert not {"torch", "numpy"} & set(loaded)


def test_planning_does_not_load_torch() -> None:
    loaded = run_python(
        "from tierkv_kernels import plan\n"
        "plan([9], num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=4)\n"
        "print(*sys.modules)"
    ).split()
    assert "numpy" in loaded
    assert "torch" not in loaded


def test_every_public_name_is_there() -> None:
    assert set(tierkv_kernels.__all__) <= set(dir(tierkv_kernels))
    for name in tierkv_kernels.__all__:
        assert getattr(tierkv_kernels, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tierkv_kernels.nothing
