"""The CPU kernel as another kind of machine runs it: cross-compiled, on an emulated CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from tierkv_kernels.call import Call
from tierkv_kernels.cpu.build import FLAGS, HERE
from tierkv_kernels.cpu.kernel import Kernel
from tierkv_kernels.cpu.library import Attention
from torch import Tensor

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = "gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user"
NOWHERE = 2**64 - 1
LINE_BYTES = 64


def why_not() -> str:
    """What this machine lacks; empty if nothing."""
    if shutil.which(COMPILER) and shutil.which(EMULATOR):
        return ""
    return f"needs {COMPILER} and {EMULATOR}: install {PACKAGES}"


def compile_for_aarch64(program: Path) -> None:
    """The kernel at its level for aarch64, and what reads its calls."""
    source = Path(__file__).with_suffix(".c")
    kernel = sorted(map(str, (HERE / "src").glob("*.c")))
    special = ("-DLEVEL=neon", '-DTIERKV_SOURCES="emulated"', f"-I{HERE / 'src'}", "-static")
    command = [COMPILER, *FLAGS, "-Werror", *special, str(source), *kernel, "-lm", "-o", program]
    subprocess.run(command, check=True)


class EmulatedKernel(Kernel):
    """Each call is a process of its own, which gets all memory that the call names."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._pool = 0
        self._attention = self._emulate
        self._regions: list[tuple[int, int]] = []

    def run(self, call: Call) -> None:
        """See Kernel."""
        plan = call.plan
        tensors = [call.q, call.k_cache, call.v_cache, call.block_table, call.out]
        tensors += [] if call.lse is None else [call.lse]
        arrays = [plan.seq_lens, plan.records]
        arrays += [plan.merge_tokens, plan.merge_indptr, plan.merge_rows]
        self._regions = [*map(_storage, tensors), *map(_array, arrays)]
        super().run(call)

    def _emulate(self, _pool: int, address: int) -> int:
        asked = Attention.from_buffer_copy(Attention.from_address(address))
        memory, begins = bytearray(), []
        for start, size in self._regions:
            memory += bytes(-len(memory) % LINE_BYTES)
            begins.append(len(memory))
            memory += ctypes.string_at(start, size)

        def moved(pointer: int | None) -> int:
            if pointer is None:
                return NOWHERE
            for (start, size), begin in zip(self._regions, begins, strict=True):
                if start <= pointer < start + size or (not size and pointer == start):
                    return begin + pointer - start
            raise AssertionError("the call names memory that is none of its tensors'")

        for name, kind in Attention._fields_:
            if kind is ctypes.c_void_p:
                setattr(asked, name, moved(getattr(asked, name)))
        for cache in (asked.k, asked.v):
            cache.data = moved(cache.data)
        sent = np.uint64(len(memory)).tobytes() + bytes(asked) + memory
        done = subprocess.run(
            [EMULATOR, self._program], input=sent, capture_output=True, check=True
        )
        result, after = done.stdout[:4], done.stdout[4:]
        for (start, size), begin in zip(self._regions, begins, strict=True):
            ctypes.memmove(start, after[begin : begin + size], size)
        return int.from_bytes(result, "little")


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _array(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
