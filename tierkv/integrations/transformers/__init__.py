"""transformers on tierkv: ``attach(model)``, and ``model.generate()`` as ever."""

from __future__ import annotations

from tierkv.integrations.transformers.attach import Attached, attach
from tierkv.integrations.transformers.cache import TierKVCache

__all__ = ["Attached", "TierKVCache", "attach"]
