"""Where the connector logs: vLLM shows what is logged under its own name."""

import logging

log = logging.getLogger("vllm.tierkv")
