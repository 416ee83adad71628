"""Everything that can compute attention on this machine's CPU, each as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from tierkv_kernels import BackendUnavailable, attention, paged_attention
from tierkv_kernels.cpu import Kernel, levels
from torch import Tensor

Attend = Callable[..., tuple[Tensor, Tensor | None]]


def with_torch(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return paged_attention(*tensors, backend="torch", **options)


@functools.cache
def kernel_of(level: str, threads: int = 2) -> Kernel:
    return Kernel(level, threads)


def with_kernel(kernel: Kernel) -> Attend:
    """paged_attention that runs on this kernel."""

    def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        with patch.object(attention, "default_kernel", lambda: kernel):
            return paged_attention(*tensors, backend="cpu", **options)

    return attend


def levels_here() -> list[str]:
    try:
        return levels()
    except BackendUnavailable:
        return []  # no compiler: what must not be is found by test_build.py


def level(name: str) -> Attend:
    return lambda *tensors, **options: with_kernel(kernel_of(name))(*tensors, **options)


each_level = pytest.mark.parametrize("level", levels_here())
each_backend = pytest.mark.parametrize(
    "attend",
    [pytest.param(with_torch, id="torch")]
    + [pytest.param(level(name), id=f"cpu {name}") for name in levels_here()],
)
