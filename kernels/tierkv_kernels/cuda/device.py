"""A device with the kernels that were loaded on it."""

from __future__ import annotations

import threading

from tierkv_kernels.cuda import bindings
from tierkv_kernels.cuda.driver import Context, Driver, Function
from tierkv_kernels.cuda.images import OLDEST, Images
from tierkv_kernels.cuda.variants import Variant
from tierkv_kernels.errors import BackendUnavailable


class KernelDevice:
    """Loads each variant once, and keeps the device's primary context for as long as it lives."""

    def __init__(self, driver: Driver, ordinal: int, images: Images) -> None:
        """Raises BackendUnavailable if the device is too old, DriverError."""
        self.device = driver.device(ordinal)
        if self.device.attribute(bindings.COMPUTE_CAPABILITY_MAJOR) * 10 < OLDEST:
            raise BackendUnavailable(
                f"{self.device.name} is {self.device.arch}, the kernels need sm_{OLDEST} or newer"
            )
        self.context = self.device.context()
        self._images, self._arch = images, self.device.arch
        self._functions: dict[Variant, Function] = {}
        self._loading = threading.Lock()

    def function(self, variant: Variant, shared_bytes: int = 0) -> Function:
        """The loaded kernel, which may use so much dynamic shared memory.

        The first time it may compile, which takes a second. Raises CompileError, DriverError.
        """
        with self._loading:
            function = self._functions.get(variant)
            if function is None:
                image = self._images.get(variant, self._arch)
                with self.context:
                    function = _load(self.context, image, variant.name, shared_bytes)
                self._functions[variant] = function
        return function

    def resident_blocks(self, variant: Variant, threads: int, shared_bytes: int) -> int:
        """Thread blocks that the whole device runs at once."""
        function = self.function(variant, shared_bytes)
        with self.context:
            per_multiprocessor = function.resident_blocks(threads, shared_bytes)
        return per_multiprocessor * self.device.attribute(bindings.MULTIPROCESSORS)

    def synchronize(self, stream: int) -> None:
        """Wait until a stream, by its handle, has done all that it was given."""
        with self.context:
            self.context.calls.cuStreamSynchronize(stream)

    def close(self) -> None:
        """Unload the kernels and give the context back."""
        with self.context:
            for function in self._functions.values():
                function.module.close()
        self._functions.clear()
        self.context.close()


def _load(context: Context, image: bytes, name: str, shared_bytes: int) -> Function:
    module = context.module(image)
    try:
        function = module.function(name)
        if shared_bytes:
            function.allow_shared(shared_bytes)
    except BaseException:
        module.close()
        raise
    return function
