"""Test support: how much memory a file takes, and how much of it this process has mapped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def memory_bytes(fd: int) -> int:
    """Memory that the file takes."""
    return os.fstat(fd).st_blocks * 512


def mapped_bytes(mapping: np.ndarray) -> int:
    """Memory that this process has mapped in the mapping that begins with the array."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{mapping.ctypes.data:x}-") for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
