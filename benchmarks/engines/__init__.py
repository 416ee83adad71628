"""A real vLLM with and without a KV store behind it: ``python -m benchmarks.engines``."""
