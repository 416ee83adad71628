"""Attention on a CPU: a kernel in C for several instruction sets, one picked at load."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tierkv_kernels.cpu.kernel import Kernel, levels

__all__ = ["Kernel", "default_kernel", "levels", "read_blocks"]


@functools.cache
def default_kernel() -> Kernel:
    """The process's own kernel: fastest level, all CPUs. Raises BackendUnavailable."""
    return Kernel()


def read_blocks(cache: Tensor, slots: npt.NDArray[np.int64]) -> int:
    """``Kernel.read_blocks`` of the process's own kernel."""
    return default_kernel().read_blocks(cache, slots)
