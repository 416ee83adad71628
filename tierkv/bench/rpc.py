"""Round trips that do next to nothing: what socket, framing and dispatch cost."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.bench.bars import Takes
from tierkv.bench.daemon import Daemon, Link, spec_of
from tierkv.bench.echo import Echo
from tierkv.bench.harness import MICROSECONDS, Against, Bench, Line, each_call
from tierkv.rpc.messages import Done, Release
from tierkv.rpc.wire import encode


def run(bench: Bench) -> Iterator[Line]:
    """A release of no sequences as a bare frame, and a lookup of no tokens by the worker API."""
    calls = bench.pick(5000, 300)
    place = bench.same_core
    request = encode(1, Release([]))
    with (
        Daemon(bench, place, "rpc", {}) as daemon,
        daemon.connect() as cache,
        Echo(bench, place, len(encode(1, Done()))) as echo,
    ):
        namespace, link = cache.namespace(spec_of(64)), Link(daemon.socket)
        in_c, plain = f"{echo.name}, C client", f"{echo.name}, Python client"
        measured = bench.interleave(
            place,
            {
                "null": lambda: each_call(lambda: link.exchange(request), calls),
                "worker": lambda: each_call(lambda: namespace.lookup([]), calls),
                plain: lambda: each_call(lambda: echo.exchange(request), calls),
                in_c: lambda: echo.ping(len(request), calls),
            },
        )
        link.close()
    median_of_c = Against(in_c, 50)
    yield measured.line(
        "rpc.null.p50", MICROSECONDS, "null", [in_c, plain], place, bars=[Takes(1.6, in_c)]
    )
    yield measured.line(
        "rpc.null.p99",
        MICROSECONDS,
        "null",
        [median_of_c, in_c, plain],
        place,
        percentile=99,
        bars=[Takes(2, median_of_c.name)],
    )
    yield measured.line("rpc.worker.lookup", MICROSECONDS, "worker", [in_c, plain], place)
