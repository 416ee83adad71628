"""Which LoRA adapters are which: by their files, which the scheduler does not wait for."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tierkv.errors import InvalidArgument
from tierkv.integrations.vllm.identity import adapter_fingerprint
from tierkv.integrations.vllm.logs import log

ADAPTERS_MAX = 1024
"""Whose fingerprints are kept."""


class Adapters:
    """Reads the files of an adapter when it is first used, on a thread of its own."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tierkv-adapters")
        self._known: dict[tuple[int, str], Future[str | None]] = {}

    def fingerprint(self, adapter: Any, wait_s: float) -> str | None:
        """Of a ``LoRARequest``'s files; None if they are not here, or not read yet.

        Waits for at most ``wait_s``, once for each adapter.
        """
        key = (adapter.lora_int_id, adapter.lora_path)
        if key not in self._known or adapter.load_inplace:
            self._known[key] = self._reader.submit(_read, adapter.lora_name, adapter.lora_path)
            while len(self._known) > ADAPTERS_MAX:
                self._known.pop(next(iter(self._known))).cancel()
            concurrent.futures.wait([self._known[key]], wait_s)
        known = self._known[key]
        return known.result() if known.done() and not known.cancelled() else None

    def close(self) -> None:
        """Read no more; does not wait."""
        self._reader.shutdown(wait=False, cancel_futures=True)


def _read(name: str, path: str) -> str | None:
    try:
        return adapter_fingerprint(path)
    except (InvalidArgument, OSError) as error:
        log.warning("requests of LoRA %s bypass tierkv: %s", name, error)
        return None
