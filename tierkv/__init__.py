"""tierkv: keeps the KV cache of language models in RAM and on NVMe, crash-safe."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.client import aio
    from tierkv.client.sync import Client, connect
    from tierkv.core.spec import KVSpec
    from tierkv.manager import KVCacheManager
    from tierkv.native.pages import Pages

__version__ = "0.1.0"
__all__ = ["Client", "KVCacheManager", "KVSpec", "Pages", "aio", "connect"]

_HOME = {
    "Client": ("tierkv.client.sync", "Client"),
    "connect": ("tierkv.client.sync", "connect"),
    "KVCacheManager": ("tierkv.manager", "KVCacheManager"),
    "KVSpec": ("tierkv.core.spec", "KVSpec"),
    "Pages": ("tierkv.native.pages", "Pages"),
    "aio": ("tierkv.client.aio", None),
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: the CLI must not pay for numpy."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
