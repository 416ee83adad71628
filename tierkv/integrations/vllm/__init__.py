"""The vLLM connector: vLLM loads ``TierKVConnector`` from here by ``kv_connector_module_path``."""

from tierkv.integrations.vllm.connector import TierKVConnector

__all__ = ["TierKVConnector"]
