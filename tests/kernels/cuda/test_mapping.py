"""Device memory that two processes map, over the stand-in."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tierkv_kernels import BackendUnavailable
from tierkv_kernels.cuda import bindings
from tierkv_kernels.cuda.driver import Context, Device
from tierkv_kernels.cuda.mapping import Mapping, granularity
from tierkv_kernels.errors import DriverError

OTHER_PROCESS = """
import ctypes, sys
sys.path[:] = {path!r}
from tierkv_kernels.cuda.driver import Driver
from tierkv_kernels.cuda.mapping import Mapping
context = Driver({library!r}).device(0).context()
with context:
    mapping = Mapping.open(context, {fd}, {nbytes})
    memory = (ctypes.c_ubyte * {nbytes}).from_address(mapping.address)
    assert memory[5] == 77
    memory[{nbytes} - 1] = 88
    mapping.close()
"""


def test_a_size_is_rounded_up(context: Context) -> None:
    unit = granularity(context.device)
    for nbytes, units in ((1, 1), (unit, 1), (unit + 1, 2)):
        mapping = Mapping.create(context, nbytes)
        assert mapping.nbytes == units * unit
        mapping.close()
        mapping.close()


def test_another_process_maps_the_same_memory(context: Context, standin_driver: Path) -> None:
    mapping = Mapping.create(context, 1)
    memory = (ctypes.c_ubyte * mapping.nbytes).from_address(mapping.address)
    memory[5] = 77
    fd = mapping.export_fd()
    code = OTHER_PROCESS.format(
        path=sys.path, library=str(standin_driver), fd=fd, nbytes=mapping.nbytes
    )
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[fd])
    assert memory[mapping.nbytes - 1] == 88
    del memory
    os.close(fd)
    mapping.close()


def test_memory_lives_as_long_as_its_last_holder(context: Context) -> None:
    mapping = Mapping.create(context, 1)
    (ctypes.c_ubyte * 1).from_address(mapping.address)[0] = 9
    fd = mapping.export_fd()
    mapping.close()
    again = Mapping.open(context, fd, mapping.nbytes)
    os.close(fd)
    assert (ctypes.c_ubyte * 1).from_address(again.address)[0] == 9
    again.close()


def test_memory_in_use_cannot_be_unmapped(context: Context) -> None:
    mapping = Mapping.create(context, 1)
    stream = context.stream()
    stream.fill(mapping.address, 1, mapping.nbytes)
    address = mapping.address
    with pytest.raises(DriverError, match="cuMemUnmap: CUDA_ERROR_ILLEGAL_ADDRESS"):
        mapping.close()
    stream.synchronize()
    mapping.close()
    assert address
    stream.close()


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_what_fails_leaves_nothing_behind(
    call: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = context.free_bytes()
    monkeypatch.setenv("TIERKV_STANDIN_FAIL", f"{call}=2")
    with pytest.raises(DriverError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        Mapping.create(context, 1)
    assert context.free_bytes() == free


def test_a_descriptor_of_something_else_is_refused(context: Context, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x")
        file.flush()
        with pytest.raises(DriverError, match="cuMemImportFromShareableHandle"):
            Mapping.open(context, file.fileno(), granularity(context.device))


def test_a_device_that_cannot_share_says_so(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute = Device.attribute

    def lacking(device: Device, which: int) -> int:
        return 0 if which == bindings.POSIX_FD_SUPPORTED else attribute(device, which)

    monkeypatch.setattr(Device, "attribute", lacking)
    with pytest.raises(BackendUnavailable, match="simulated device 0 cannot share its memory"):
        Mapping.create(context, 1)
