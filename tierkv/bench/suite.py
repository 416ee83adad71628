"""All workloads by name: each is made of measurements, and a measurement yields lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

from tierkv.bench.harness import Bench, Line

WORKLOADS = {
    "rpc": ("rpc.run", "hashing.run"),
    "lookup": ("lookup.run",),
    "put": ("put.run", "requests.run", "durable.run", "small.run", "first.run", "workers.puts"),
    "get": ("get.run", "warm.run", "workers.gets", "attach.run"),
    "promote": ("promote.run", "disk.run"),
    "spill": ("spill.run",),
    "replay": ("replay.run",),
    "growth": ("growth.run", "index_size.run"),
    "mixed": ("mixed.run", "turns.run"),
    "attention": ("attention.run", "served.run"),
}
"""Names of functions in the modules beside this one, which are only imported when they run."""

ROUNDS, ROUNDS_QUICK = 5, 2


def run(workload: str, bench: Bench) -> Iterator[Line]:
    """The lines of a workload, each as soon as it is measured."""
    for name in WORKLOADS[workload]:
        module, _, function = name.partition(".")
        measurement: Callable[[Bench], Iterator[Line]] = getattr(
            import_module(f"tierkv.bench.{module}"), function
        )
        yield from measurement(bench)
