"""The vLLM connector: vLLM loads ``TierKVConnector`` from here by ``kv_connector_module_path``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.integrations.vllm.connector import TierKVConnector

__all__ = ["TierKVConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector, and with it vLLM, when it is asked for: its parts need no vLLM."""
    if name != "TierKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierkv.integrations.vllm.connector import TierKVConnector

    return TierKVConnector
