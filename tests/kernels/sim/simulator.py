"""The CUDA kernels in the simulator, behind the launcher and the interface of the real ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tierkv_kernels.call import Call, check_call
from tierkv_kernels.cuda.images import SOURCES
from tierkv_kernels.cuda.launches import PlanLaunches
from tierkv_kernels.cuda.limits import check_limits
from tierkv_kernels.cuda.variants import Variant
from torch import Tensor

from tests.kernels.sim.build import FAST, library

SCHEDULES = ("ring", "random", "ahead")
"""Threads in turn and copies as late as may be; in random order; one warp as far as it can."""


class SimulatorError(Exception):
    """What the simulator found: block, thread, line of the source, and what is wrong there."""


class Simulated:
    """One variant of a kernel, as a function of the driver: to be launched."""

    def __init__(self, path: Path, name: str, schedule: str, seed: int) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cusim_error.restype = ctypes.c_char_p
        self._library.cusim_bank_conflicts.restype = ctypes.c_uint64
        self._name, self._schedule, self._seed = name.encode(), schedule, seed
        self.shared_given = 0

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Any,
    ) -> None:
        """Run to the end. Raises SimulatorError."""
        assert grid[1:] == (1, 1)
        self.shared_given = shared_bytes
        schedule = SCHEDULES.index(self._schedule)
        self._library.cusim_schedule(schedule, ctypes.c_uint64(self._seed))
        failed = self._library.cusim_launch(self._name, grid[0], threads, shared_bytes, arguments)
        self._library.cusim_schedule(0, ctypes.c_uint64(0))
        if failed:
            raise SimulatorError(self._library.cusim_error().decode())

    @property
    def shared_used(self) -> int:
        """Bytes of shared memory up to the last that was touched so far."""
        return int(self._library.cusim_shared_used())

    def allow_copies_from(self, tensors: Sequence[Tensor]) -> None:
        """Asynchronous copies may read these tensors' memory and no other; none: any."""
        self._library.cusim_sources(ctypes.c_uint64(0), ctypes.c_uint64(0))
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = ctypes.c_uint64(storage.nbytes())
            self._library.cusim_sources(ctypes.c_uint64(storage.data_ptr()), size)

    @property
    def bank_conflicts(self) -> int:
        """Cycles that matrix loads lost to each other in all launches so far."""
        return int(self._library.cusim_bank_conflicts())


class SimulatedDevice:
    """Compiles variants for the simulator, as a KernelDevice does for a card."""

    def __init__(
        self,
        schedule: str = "ring",
        seed: int = 1,
        *,
        options: Sequence[str] = FAST,
        macros: Sequence[str] = (),
        sources: Path = SOURCES,
    ) -> None:
        self.functions: dict[Variant, Simulated] = {}
        self._schedule, self._seed = schedule, seed
        self._options, self._macros, self._sources = options, macros, sources

    def function(self, variant: Variant, shared_bytes: int = 0) -> Simulated:
        """To be launched with up to so much dynamic shared memory, which is checked there."""
        if variant not in self.functions:
            path = library(
                variant, options=self._options, macros=self._macros, sources=self._sources
            )
            self.functions[variant] = Simulated(path, variant.name, self._schedule, self._seed)
        return self.functions[variant]

    def run(self, call: Call) -> None:
        """Fill ``call.out`` and ``call.lse``. Raises InvalidInput, SimulatorError."""
        check_limits(call)
        launches = PlanLaunches(call, self)  # type: ignore[arg-type]  # launches and no more
        try:
            for function in self.functions.values():
                function.allow_copies_from((call.k_cache, call.v_cache))
            launches.run(call, 0)
        finally:  # whoever loads the same library finds it as it was
            for function in self.functions.values():
                function.allow_copies_from(())


def attention(
    device: SimulatedDevice,
    *tensors: Tensor,
    q_indptr: Tensor | None = None,
    plan: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As ``paged_attention``, on a simulated device."""
    call = check_call(
        *tensors,
        q_indptr=q_indptr,
        plan=plan,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        return_lse=return_lse,
    )
    with torch.no_grad():
        device.run(call)
    return call.out, call.lse
