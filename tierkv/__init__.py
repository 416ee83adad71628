"""tierkv: keeps the KV cache of language models in GPU memory, host RAM and NVMe, crash-safe."""

__version__ = "0.1.0"
