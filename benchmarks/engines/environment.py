"""What LMCache needs beside vLLM: the one place for its versions."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.catalog import Environment

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
LOCK = ROOT / "requirements" / "vllm.lock"

LMCACHE = Environment(
    "vllm-lmcache",
    (
        ("torch==2.13.0",),
        # Its own dependencies ask for CUDA's packages, none of which the server touches on a CPU.
        (
            "--no-compile",
            "--no-deps",
            *LOCK.read_text().split(),
            "lmcache==0.5.6",
            "aiofile==3.12.3",
            "caio==0.12.10",
            "sortedcontainers==2.4.0",
            "opentelemetry-exporter-prometheus==0.66b2",
        ),
    ),
)
