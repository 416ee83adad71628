"""The benchmark suite: ``python -m benchmarks``. docs/BENCHMARKS.md says what each line means."""
