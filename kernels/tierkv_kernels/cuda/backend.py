"""The CUDA backend: runs a checked call on the device of its tensors, on the present stream.

Where a device reads ordinary host memory as its own, CPU tensors run as well, and the call waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from tierkv_kernels.call import Call, check_shared_prefixes, check_table
from tierkv_kernels.cuda import bindings, variants
from tierkv_kernels.cuda.cache import KernelCache
from tierkv_kernels.cuda.device import KernelDevice
from tierkv_kernels.cuda.driver import Driver
from tierkv_kernels.cuda.geometry import THREADS, Geometry
from tierkv_kernels.cuda.images import Images
from tierkv_kernels.cuda.launches import PlanLaunches
from tierkv_kernels.cuda.nvrtc import Nvrtc
from tierkv_kernels.cuda.writes import launch_write
from tierkv_kernels.errors import InvalidInput
from tierkv_kernels.write_call import WriteCall

DEFAULT_STREAM = 0


class CudaBackend:
    """The devices of a driver, each taken up when a call first needs it."""

    def __init__(self, driver: Driver, images: Images) -> None:
        self._driver, self._images = driver, images
        self._devices: dict[int, KernelDevice] = {}
        self._taking_up = threading.Lock()

    def take_up(self, device: torch.device) -> None:
        """Make a device ready, as its first call does. Raises BackendUnavailable, DriverError."""
        self._device_of(device)

    def run(self, call: Call) -> None:
        """Launch what fills ``call.out`` and ``call.lse``.

        Raises InvalidInput before any launch; CompileError, DriverError.
        """
        if call.q.device.type == "cpu":
            table = call.block_table.numpy()
            check_table(table, call.plan, call.k_cache.shape[0])
            check_shared_prefixes(table, call.plan)
        device, stream = self._device_of(call.q.device), _stream(call.q.device)
        launches = _launches(call, device, stream)
        self._launch(call.q.device, device, stream, lambda: launches.run(call, stream))

    def write(self, write: WriteCall) -> None:
        """Launch what fills the caches.

        Raises InvalidInput before any launch; CompileError, DriverError.
        """
        device, stream = self._device_of(write.k.device), _stream(write.k.device)
        self._launch(write.k.device, device, stream, lambda: launch_write(write, device, stream))

    def _launch(
        self,
        of_tensors: torch.device,
        device: KernelDevice,
        stream: int,
        launch: Callable[[], None],
    ) -> None:
        if device.context.is_current():
            launch()
        else:
            with device.context:
                launch()
        if of_tensors.type == "cpu":
            device.synchronize(stream)

    def num_workers(self, device: torch.device, head_dim: int, *, kv_bytes: int = 2) -> int:
        """What ``plan`` wants as ``num_workers`` for decode on that device."""
        geometry = Geometry(head_dim, kv_bytes, row_warps=1)
        variant = variants.attention(
            bf16=True, kv_fp8=kv_bytes == 1, head_dim=head_dim, row_warps=1
        )
        kernel_device = self._device_of(device)
        return kernel_device.resident_blocks(variant, THREADS, geometry.shared_bytes)

    def close(self) -> None:
        """Give the devices back; nothing may run on them any more."""
        for device in self._devices.values():
            device.close()
        self._devices.clear()

    def _device_of(self, device: torch.device) -> KernelDevice:
        if device.type == "cpu":
            kernel_device = self._device(0)
            if not kernel_device.device.attribute(bindings.PAGEABLE_MEMORY_ACCESS):
                raise InvalidInput('q: got device cpu, want cuda for backend="cuda"')
            return kernel_device
        return self._device(torch.cuda.current_device() if device.index is None else device.index)

    def _device(self, ordinal: int) -> KernelDevice:
        with self._taking_up:
            if ordinal not in self._devices:
                self._devices[ordinal] = KernelDevice(self._driver, ordinal, self._images)
            return self._devices[ordinal]


@functools.cache
def cuda_backend() -> CudaBackend:
    """That of this process, over the system's driver. Raises BackendUnavailable."""
    return CudaBackend(Driver(), Images(Nvrtc.find(), KernelCache()))


def _stream(device: torch.device) -> int:
    """The handle of the present one."""
    if device.type == "cpu":
        return DEFAULT_STREAM
    return torch.cuda.current_stream(device.index).cuda_stream


def _launches(call: Call, device: KernelDevice, stream: int) -> PlanLaunches:
    kept: dict[object, PlanLaunches] = call.plan.scratch.setdefault("cuda", {})
    key = (device, stream, call.q.dtype, call.k_cache.dtype)
    launches = kept.get(key)
    if launches is None:
        launches = kept[key] = PlanLaunches(call, device)
    return launches
