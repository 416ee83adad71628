"""What is put and what must come back: the content of a block follows from its number.

Any process can tell a wrong byte, also one that did not put the block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
STAMP_BYTES = 8


def key_of(number: int) -> bytes:
    """The name of a block: 16 bytes that no other number shares."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


class Content:
    """Blocks in ``memory`` (u8 [blocks, block_bytes]): block n is row n % blocks, stamped."""

    def __init__(self, memory: U8) -> None:
        self._blocks = memory
        words = memory.view(np.uint64)
        words[:] = np.random.default_rng(1).integers(0, 1 << 64, words.shape, np.uint64)

    def __len__(self) -> int:
        return len(self._blocks)

    def stamped(self, first: int, count: int) -> U8:
        """Blocks ``first`` to ``first + count - 1``, ready to be put (u8 [count, block_bytes])."""
        row = first % len(self._blocks)
        if row + count > len(self._blocks):
            raise ValueError(f"{count} blocks from row {row} of {len(self._blocks)}")
        blocks = self._blocks[row : row + count]
        blocks.view(np.uint64)[:, 0] = np.arange(first, first + count, dtype=np.uint64)
        return blocks

    def wrong(self, numbers: Sequence[int], blocks: U8) -> int:
        """How many of the ``blocks`` (u8 [n, block_bytes]) are not, byte for byte, what was put."""
        words, own = blocks.view(np.uint64), self._blocks.view(np.uint64)
        return sum(
            int(word[0]) != number or not np.array_equal(word[1:], own[number % len(own), 1:])
            for number, word in zip(numbers, words, strict=True)
        )
