"""The kernels of this process where they can run; torch takes their place where not."""

from __future__ import annotations

import functools
import warnings

import torch

from tierkv_kernels.cpu import Kernel, default_kernel
from tierkv_kernels.cuda.backend import CudaBackend, cuda_backend
from tierkv_kernels.errors import BackendUnavailable


@functools.cache
def cuda_backend_if_there(device: torch.device) -> CudaBackend | None:
    """What runs on that device. Warns, once, if there is nothing. Raises DriverError."""
    try:
        backend = cuda_backend()
        backend.take_up(device)
        return backend
    except BackendUnavailable as error:
        warnings.warn(f"attention on CUDA runs on torch, slower: {error}", stacklevel=4)
        return None


@functools.cache
def cpu_kernel_if_there() -> Kernel | None:
    """Warns, once, if there is none."""
    try:
        return default_kernel()
    except BackendUnavailable as error:
        warnings.warn(f"attention on the CPU runs on torch, slower: {error}", stacklevel=4)
        return None
