"""Paged attention against others' on this machine: ``python -m benchmarks.attention``."""
