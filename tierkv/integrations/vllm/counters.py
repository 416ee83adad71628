"""What the connector counts. vLLM's ``/metrics`` shows ``vllm:tierkv_<name>_total``."""

from __future__ import annotations

from typing import NamedTuple

METRIC_PREFIX = "vllm:tierkv_"


class Counted(NamedTuple):
    """A counter: its name without prefix and ``_total``, and what it counts."""

    name: str
    help: str


COUNTERS = (
    Counted("lookups", "Requests whose prefix was looked up in tierkv."),
    Counted("lookup_tokens", "Prompt tokens of these that the engine itself did not have."),
    Counted("hit_tokens", "Of these, tokens whose KV tierkv had."),
    Counted("failed_lookups", "Lookups that the daemon did not answer (in time): misses."),
    Counted("loaded_blocks", "Blocks copied from tierkv into the engine."),
    Counted("loaded_bytes", "Their bytes."),
    Counted("load_seconds", "Time spent on that, in the background."),
    Counted("failed_load_blocks", "Blocks that could not be loaded: recomputed."),
    Counted("saved_blocks", "Blocks copied from the engine into tierkv."),
    Counted("saved_bytes", "Their bytes."),
    Counted("save_seconds", "Time spent on that, in the background."),
    Counted("known_blocks", "Blocks that tierkv had already when they were to be saved."),
    Counted("dropped_save_blocks", "Blocks that were not saved: no daemon, no room, or too late."),
)
