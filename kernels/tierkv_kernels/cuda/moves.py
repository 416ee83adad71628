"""Many pieces of memory moved by one launch: scattered blocks, which copies would take one by one.

The pieces may lie on the device, or in host memory that was registered there and has the same
address on both sides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.device import KernelDevice
from tierkv_kernels.cuda.driver import Stream, arguments_of
from tierkv_kernels.cuda.params import MoveParams
from tierkv_kernels.errors import require

PIECE_DTYPE = np.dtype([("source", np.uint64), ("target", np.uint64), ("bytes", np.uint64)])
"""Addresses and a length; fast where both addresses are multiples of 16. As ``MovePiece`` in C."""

SPAN_BYTES = 32768
"""What a thread block moves: TKV_SPAN_BYTES in src/params.h."""

THREADS = 256
GRID_MAX = 2**31 - 1


class Mover:
    """Moves pieces on one stream. Not for several threads at once."""

    def __init__(self, device: KernelDevice, stream: Stream, room: int = 4096) -> None:
        """room: most pieces of one launch. The device's context must be current here and below.

        Raises CompileError, DriverError.
        """
        self._device, self._stream, self._room = device, stream, room
        self._function = device.function(variants.move())
        self._list = device.context.allocate(room * PIECE_DTYPE.itemsize)
        self._params = MoveParams(pieces=self._list)
        self._arguments = arguments_of(self._params)

    def move(self, pieces: npt.NDArray[np.void]) -> None:
        """Give the stream the moves of [n] of PIECE_DTYPE, in no order; no two may overlap.

        Returns at once; the array may be changed then. Raises InvalidInput, DriverError.
        """
        require(
            pieces.ndim == 1 and pieces.dtype == PIECE_DTYPE,
            f"pieces: got shape {pieces.shape} of {pieces.dtype}, want [n] of {PIECE_DTYPE}",
        )
        wanted = pieces[pieces["bytes"] > 0]
        for begin in range(0, len(wanted), self._room):
            self._launch(np.ascontiguousarray(wanted[begin : begin + self._room]))

    def close(self) -> None:
        """Give the list's memory back; waits for what was launched."""
        self._device.context.free(self._list)

    def _launch(self, pieces: npt.NDArray[np.void]) -> None:
        spans = -(-int(pieces["bytes"].max()) // SPAN_BYTES)
        blocks = len(pieces) * spans
        require(blocks <= GRID_MAX, f"pieces: got {blocks} spans, want at most {GRID_MAX}")
        # Memory that is not registered is read before the call returns.
        self._stream.copy_to_device(self._list, pieces.ctypes.data, pieces.nbytes)
        self._params.num_pieces, self._params.spans = len(pieces), spans
        self._function.launch((blocks, 1, 1), THREADS, 0, self._stream.handle, self._arguments)
