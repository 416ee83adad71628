"""Signs of life stop while a thread is in one job for too long, and only then."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from pathlib import Path

import pytest

from tests.service.running import until
from tierkv.service.systemd import Notifier
from tierkv.service.watchdog import Pulse, feed, period_s

PERIOD_S = 0.15


def test_a_pulse_knows_the_longest_job_under_way() -> None:
    pulse, go_on = Pulse(), threading.Event()
    assert pulse.longest_s < PERIOD_S
    threads = [threading.Thread(target=pulse.watched(go_on.wait)) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: pulse.longest_s > PERIOD_S, "for the jobs to take long")
    go_on.set()
    for thread in threads:
        thread.join()
    assert pulse.longest_s < PERIOD_S
    assert pulse.watched(lambda: 3)() == 3
    with pytest.raises(ZeroDivisionError):
        pulse.watched(lambda: 1 // 0)()
    assert pulse.longest_s < PERIOD_S


def test_a_stuck_job_starves_the_watchdog_until_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(4 * PERIOD_S)
        pulse, go_on = Pulse(), threading.Event()

        async def main() -> None:
            loop = asyncio.get_running_loop()
            notifier = Notifier(str(tmp_path / "notify"))
            feeding = loop.create_task(feed(notifier, PERIOD_S, {"the movers": pulse}))
            assert await asyncio.to_thread(manager.recv, 99) == b"WATCHDOG=1"
            stuck = loop.run_in_executor(None, pulse.watched(go_on.wait))
            await asyncio.to_thread(hear_the_last, manager)
            go_on.set()
            await stuck
            assert await asyncio.to_thread(manager.recv, 99) == b"WATCHDOG=1"
            feeding.cancel()

        asyncio.run(main())
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "CRITICAL"]
    assert said.startswith("the movers: a thread has been in one job for more than")


def hear_the_last(manager: socket.socket) -> None:
    """Return when no more signs of life come; some may be on their way already."""
    with contextlib.suppress(TimeoutError):
        while manager.recv(99):
            pass


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_who_is_watched(environment: dict[str, str], seconds: float) -> None:
    assert period_s(environment) == seconds
