"""The device tier on a GPU: an arena whose payload is the GPU's memory."""

from __future__ import annotations

import os
import time

from tierkv_kernels.cuda.bindings import OUT_OF_MEMORY
from tierkv_kernels.errors import DriverError, KernelError

from tierkv.errors import ConfigError, TierFailed, TierFull
from tierkv.gpu import Gpu, GpuMemory
from tierkv.tiers.arena import Arena
from tierkv.tiers.payload import GpuPayload

POOLS_MAX = 1
"""A GPU's memory does not appear where it is touched, so pools cannot share a budget in it as they
do in sparse files. All of it is the first pool's."""


PATIENCE_S = 5.0
"""How long to wait for memory that workers of the last daemon are just giving back."""

LOOK_S = 0.1


def gpu_arena(gpu: Gpu, name: str, budget_bytes: int) -> Arena:
    """A new arena on the GPU. There is never an old one: nothing proves what outlives a daemon.

    Raises TierFull if the GPU has not so much memory left, TierFailed if it cannot share any.

    Crash: the memory goes with the last process that maps it.
    """
    if budget_bytes < 1:
        raise ConfigError(f"{name}.bytes is {budget_bytes}; it must be at least 1")
    try:
        memory = _take(gpu, name, budget_bytes)
        payload = GpuPayload(memory.export_fd(), memory, budget_bytes)
    except KernelError as error:
        raise TierFailed(f"cannot take memory of the {gpu.name}: {error}") from error
    os.set_inheritable(payload.fd, False)
    return Arena.on(payload, name, budget_bytes, POOLS_MAX)


def _take(gpu: Gpu, name: str, size_bytes: int) -> GpuMemory:
    given_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return GpuMemory.make(gpu, size_bytes)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            if time.monotonic() > given_up_s:
                free_bytes = gpu.free_bytes()
                raise TierFull(
                    f"the {gpu.name} has {free_bytes} bytes for the {name} tier, which is to have "
                    f"{size_bytes}: lower {name}.bytes, or end what else uses the GPU; workers of "
                    "an earlier daemon keep its memory until they drop their views, or end",
                    free=free_bytes,
                    asked=size_bytes,
                ) from error
            time.sleep(LOOK_S)
