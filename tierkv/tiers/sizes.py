"""What one slot takes in each tier."""

from __future__ import annotations

from tierkv.core.ids import Tier
from tierkv.core.spec import slot_stride
from tierkv.core.state import PoolShape
from tierkv.tiers.disk import disk_slot_bytes


def slot_bytes(tier: Tier, shape: PoolShape) -> int:
    """Bytes of one slot, padding and header included: what counts against the tier's budget."""
    if tier is Tier.DISK:
        return disk_slot_bytes(shape.block_bytes, shape.block_tokens)
    return slot_stride(shape.block_bytes)
