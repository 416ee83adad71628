"""The integers that name things, as distinct types."""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

Row = NewType("Row", int)
"""Index of a block in the columns of ``core.blocks.Blocks``. Reused after the block is gone."""

BlockId = NewType("BlockId", int)
"""Name of a block for ever: 64 bits, never reused. 0 = no block."""

SequenceId = NewType("SequenceId", int)
"""(lease << 32) | the number the worker chose for the sequence."""

LeaseId = NewType("LeaseId", int)
NamespaceId = NewType("NamespaceId", int)
PoolId = NewType("PoolId", int)
Lsn = NewType("Lsn", int)

NO_SLOT = 0xFFFFFFFF
"""Value of a slot column where the block has no copy in that tier."""

NO_BLOCK = BlockId(0)
"""Parent of a chain's first block."""

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Tier(IntEnum):
    """Where a copy of a block can lie, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        """Name used in configuration, metrics and messages."""
        return self.name.lower()


RAM_TIERS = (Tier.DEVICE, Tier.HOST)


def sequence_id(lease: int, local: int) -> SequenceId:
    """The daemon-wide name of the sequence that ``lease`` calls ``local``."""
    return SequenceId((lease << 32) | local)


def lease_of(sequence: int) -> LeaseId:
    """The lease a sequence belongs to."""
    return LeaseId(sequence >> 32)
