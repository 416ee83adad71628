"""One worker process of the demo: answers a question through tierkv and says what it held.

Reads one JSON object on standard input, writes one on standard output.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import tierkv

from .generate import PooledKV, generate
from .smollm2 import open_model


class WatchingKV(PooledKV):
    """Remembers the block table of the sequence before it ends."""

    block_table: list[int]

    def end(self) -> None:
        """See PooledKV."""
        self.block_table = [int(slot) for slot in self._sequence.block_table]
        super().end()


def work(order: dict[str, Any]) -> dict[str, Any]:
    """Generate as ordered; the reply holds tokens, time to first token and the block table."""
    torch.set_num_threads(1)
    model, _ = open_model(order["model"])
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    with tierkv.connect(order["socket"]) as cache:
        kv = WatchingKV(cache.namespace(model.spec()))
        answer = generate(model, kv, order["prompt"], order["max_tokens"], stop_at_end=False)
    return {
        "tokens": answer.tokens,
        "ttft_s": answer.ttft_s,
        "cached_tokens": answer.cached_tokens,
        "block_table": kv.block_table,
    }


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.stdin.readline()))), flush=True)
