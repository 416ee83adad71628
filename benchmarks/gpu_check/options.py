"""How large everything is: as on a card, or tiny, for the test of this program without one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Options:
    """``device``: "cuda", or "cpu" where the driver is the stand-in, whose memory is the host's."""

    device: str
    tiny: bool

    def pick(self, usual: int, tiny: int) -> int:
        """One of the two."""
        return tiny if self.tiny else usual

    def free_bytes(self) -> int:
        """Memory that may be used on the device."""
        if self.device == "cpu":
            return 256 * MIB
        free: int = torch.cuda.mem_get_info()[0]
        return free
