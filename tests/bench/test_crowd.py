"""Worker processes: told when to begin, gone with whoever made them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.bench.crowd import Crowd, Work
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import Bench

pytestmark = [pytest.mark.slow]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, quick=True)


@pytest.fixture
def daemon(bench: Bench) -> Iterator[Daemon]:
    settings = {"device.bytes": "8 MiB", "disk.bytes": "16 MiB"}
    with Daemon(bench, bench.two_cores, "crowd", settings) as daemon:
        yield daemon


@pytest.mark.parametrize("kind", ["put", "get", "spill"])
def test_those_who_are_told_to_work_report_each_piece(
    bench: Bench, daemon: Daemon, kind: str
) -> None:
    with Crowd(bench, bench.two_cores.client, daemon, Work(kind, 65536, 4), 2) as crowd:
        crowd.start(0.2)
        both = crowd.wait()
        crowd.start(0.2, members=1)
        (one,) = crowd.wait()

        assert len(bench.children) == 3
    assert len(both) == 2
    assert all((spent > 0).all() and spent.sum() >= 0.2 for spent in [*both, one])
    assert len(bench.children) == 1, "the daemon's"


def test_a_worker_that_cannot_work_is_said_and_none_stays(bench: Bench, daemon: Daemon) -> None:
    too_much = Work("put", 65536, 1000)

    with (
        pytest.raises(RuntimeError, match="cannot work"),
        Crowd(bench, bench.two_cores.client, daemon, too_much, 2),
    ):
        pass

    assert len(bench.children) == 1, "the daemon's"
