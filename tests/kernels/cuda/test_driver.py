"""The driver's objects over the stand-in: devices, contexts, streams, events, copies, errors."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tierkv_kernels import BackendUnavailable
from tierkv_kernels.cuda import bindings
from tierkv_kernels.cuda.driver import Context, Driver
from tierkv_kernels.errors import DriverError

Bytes = npt.NDArray[np.uint8]
NBYTES = 1 << 16


def pattern(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)


def fail(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_FAIL", order)


def test_what_a_device_says_of_itself(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_DEVICES", "2")
    monkeypatch.setenv("TIERKV_STANDIN_ARCH", "12.1")
    assert driver.version == (13, 0)
    assert driver.device_count() == 2
    device = driver.device(1)
    assert device.name == "simulated device 1"
    assert len(device.uuid) == 16
    assert device.uuid != driver.device(0).uuid
    assert device.arch == "sm_121"
    assert device.total_bytes == 8 << 30
    assert device.attribute(bindings.MULTIPROCESSORS) == 132


def test_errors_name_the_call_and_what_the_driver_says(driver: Driver) -> None:
    with pytest.raises(DriverError) as caught:
        driver.device(7)
    error = caught.value
    assert str(error) == "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101): invalid device ordinal"
    assert (error.call, error.code) == ("cuDeviceGet", 101)


def test_an_error_that_the_driver_cannot_name(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "cuDeviceGetCount=12345")
    with pytest.raises(DriverError, match=r"cuDeviceGetCount: unknown \(12345\): unknown"):
        driver.device_count()


def test_no_device(standin_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_DEVICES", "0")
    with pytest.raises(BackendUnavailable, match=r"CUDA_ERROR_NO_DEVICE \(100\)"):
        Driver(str(standin_driver))


def test_calls_need_a_current_context(driver: Driver) -> None:
    context = driver.device(0).context()
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        context.stream()
    assert not context.is_current()
    with context:
        assert context.is_current()
        context.stream().close()
        with context:
            pass
        assert context.is_current()
    assert not context.is_current()
    context.close()


def test_a_context_is_current_in_one_thread(context: Context) -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(context.is_current()))
    thread.start()
    thread.join()
    assert seen == [False]


def test_copies_round_trip(context: Context) -> None:
    source, target = pattern(1), np.zeros(NBYTES, np.uint8)
    stream = context.stream()
    first, second = context.allocate(NBYTES), context.allocate(NBYTES)
    stream.copy_to_device(first, source.ctypes.data, NBYTES)
    stream.copy_on_device(second, first, NBYTES)
    stream.fill(second, 7, 100)
    stream.copy_to_host(target.ctypes.data, second, NBYTES)
    stream.synchronize()
    assert (target[:100] == 7).all()
    assert np.array_equal(target[100:], source[100:])
    context.free(first)
    context.free(second)
    stream.close()


def test_a_context_waits_for_all_of_its_streams(context: Context) -> None:
    source, target = pattern(3), np.zeros(NBYTES, np.uint8)
    context.register_host(target.ctypes.data, NBYTES)
    address = context.allocate(NBYTES)
    streams = [context.stream(), context.stream()]
    streams[0].copy_to_device(address, source.ctypes.data, NBYTES)
    streams[0].synchronize()
    for stream, part in zip(streams, np.split(target, 2), strict=True):
        stream.copy_to_host(part.ctypes.data, address, part.nbytes)
    assert not target.any()
    context.synchronize()
    assert np.array_equal(target, np.tile(source[: NBYTES // 2], 2))
    for stream in streams:
        stream.close()
    context.free(address)
    context.unregister_host(target.ctypes.data)


def test_memory_is_counted(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    before = context.free_bytes()
    address = context.allocate(NBYTES)
    assert context.free_bytes() == before - NBYTES
    monkeypatch.setenv("TIERKV_STANDIN_BYTES", str(2 * NBYTES - 1))
    with pytest.raises(DriverError) as caught:
        context.allocate(NBYTES)
    assert caught.value.code == bindings.OUT_OF_MEMORY
    context.free(address)


def test_copies_of_registered_memory_are_late(context: Context) -> None:
    """The stand-in's own promise, on which tests of movers rely."""
    data = pattern(2)
    context.register_host(data.ctypes.data, NBYTES)
    stream = context.stream()
    address = context.allocate(NBYTES)
    stream.copy_to_device(address, data.ctypes.data, NBYTES)
    data[:] = 5  # too early: the copy has not happened
    target = np.zeros(NBYTES, np.uint8)
    context.register_host(target.ctypes.data, NBYTES)
    stream.copy_to_host(target.ctypes.data, address, NBYTES)
    assert not target.any()
    assert not stream.is_done()
    assert not target.any()
    assert not stream.is_done()
    assert stream.is_done()
    assert (target == 5).all()

    stream.copy_to_device(address, data.ctypes.data, NBYTES)
    with pytest.raises(DriverError, match=r"cuMemHostUnregister: CUDA_ERROR_ILLEGAL_ADDRESS"):
        context.unregister_host(data.ctypes.data)
    stream.synchronize()
    context.unregister_host(data.ctypes.data)
    context.unregister_host(target.ctypes.data)
    context.free(address)
    stream.close()


def test_a_stream_waits_for_an_event_of_another(context: Context) -> None:
    producer, consumer, event = context.stream(), context.stream(), context.event()
    assert event.is_reached()  # as nothing was recorded
    first, second = context.allocate(NBYTES), context.allocate(NBYTES)
    for waits in (False, True):
        value = 3 if waits else 2
        producer.fill(first, value, NBYTES)
        producer.record(event)
        if waits:
            consumer.wait(event)
        consumer.copy_on_device(second, first, NBYTES)
        consumer.synchronize()
        target = np.zeros(NBYTES, np.uint8)
        consumer.copy_to_host(target.ctypes.data, second, NBYTES)
        assert (target == value).all() == waits
        assert event.is_reached() == waits
        event.synchronize()
        assert event.is_reached()
    for used in (producer, consumer, event):
        used.close()
    context.free(first)
    context.free(second)


def test_events_tell_the_time_between_them(context: Context) -> None:
    stream = context.stream()
    begin, end = context.event(timing=True), context.event(timing=True)
    stream.record(begin)
    stream.record(end)
    stream.synchronize()
    assert end.seconds_since(begin) >= 0
    for used in (stream, begin, end):
        used.close()


def test_handles_that_are_gone_are_refused(context: Context) -> None:
    stream = context.stream()
    stream.close()
    with pytest.raises(DriverError, match="cuStreamSynchronize: CUDA_ERROR_INVALID_HANDLE"):
        stream.synchronize()


def test_a_failure_can_be_ordered_for_one_call(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = context.stream()
    address = context.allocate(8)
    fail(monkeypatch, "cuMemsetD8Async=700")
    with pytest.raises(DriverError, match="cuMemsetD8Async: CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.fill(address, 0, 8)
    monkeypatch.delenv("TIERKV_STANDIN_FAIL")
    stream.fill(address, 0, 8)
    stream.close()
    context.free(address)


def test_structures_have_the_sizes_of_the_driver() -> None:
    structures = (bindings.MemLocation, bindings.MemAllocationProp, bindings.MemAccessDesc)
    assert [ctypes.sizeof(structure) for structure in structures] == [8, 32, 12]
