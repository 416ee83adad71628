"""The same work for tierkv and for what people use instead: ``python -m benchmarks.peers``."""
