"""The hot loops in C, and the same in Python: the oracle, and the fallback without a compiler."""
