"""A daemon that hangs is ended by systemd, says what it was at, and the next one goes on.

What hangs is made to by a tracer that holds a thread of the daemon in a system call. One that only
takes long for its start is left alone.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.crash.eight_prompts import ALL, fill, found, write
from tests.crash.pattern import SMALL
from tests.systemd.sandbox import DISK, NO_TCP, RAM, Sandbox

SETTINGS = f"""{RAM}{DISK}io = "threads"
direct = "off"
{NO_TCP}"""

NEW = list(range(9000, 9016))
"""A prompt that is not on disk yet."""

QUICK = """
[Service]
WatchdogSec=1500ms
"""

PATIENCE_S = 5.0
"""Until then a start has begun to ask for more, on a busy machine, too."""

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(SETTINGS, QUICK) as sandbox:
        yield sandbox


@contextmanager
def held(sandbox: Sandbox, calls: str, *which: str) -> Iterator[None]:
    """Meanwhile a thread of the daemon that makes one of these system calls does not return."""
    tracer = sandbox.start(
        "strace", "-qq", "-o", "/dev/null", "-p", sandbox.main_pid, *which,
        "-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=60000000",
    )  # fmt: skip
    try:
        sandbox.until(lambda: is_traced(sandbox, "task/*" if "-f" in which else "."), "to attach")
        yield
    finally:
        sandbox.end(tracer)


def is_traced(sandbox: Sandbox, threads: str) -> bool:
    """Whether all these threads of the daemon are."""
    process = sandbox.path(f"/proc/{sandbox.main_pid}")
    found = [path.read_text() for path in process.glob(f"{threads}/status")]
    return bool(found) and not any("TracerPid:\t0\n" in status for status in found)


def wait_for_its_stacks(sandbox: Sandbox, since: int) -> None:
    """Return when the daemon has written what its threads are at.

    It cannot end before the tracer does.
    """
    sandbox.until(lambda: "Fatal Python error: Aborted" in sandbox.log()[since:], "for the end")
    sandbox.until(lambda: "Thread 0x" in sandbox.log()[since:], "for its stacks")
    assert sandbox.show("Result") == "watchdog"


def test_a_loop_that_hangs(sandbox: Sandbox) -> None:
    with sandbox.connect() as client:
        fill(client)
        before, since = int(sandbox.show("NRestarts")), len(sandbox.log())
        with held(sandbox, "epoll_wait,epoll_pwait,epoll_pwait2"):
            wait_for_its_stacks(sandbox, since)
        sandbox.wait_for(NRestarts=before + 1, ActiveState="active")
        assert found(client) == ALL


def test_a_thread_that_moves_bytes_and_hangs(sandbox: Sandbox) -> None:
    """The loop goes on meanwhile, and says why it feeds the watchdog no more."""
    with sandbox.connect() as client:
        fill(client)
        client.flush()
        before, since = int(sandbox.show("NRestarts")), len(sandbox.log())
        segments = [
            part
            for path in sandbox.path("/var/lib/tierkv/data").iterdir()
            for part in ("-P", f"/var/lib/tierkv/data/{path.name}")
        ]
        with held(sandbox, "pwrite64,pwritev,pwritev2", "-f", *segments):
            namespace = client.namespace(SMALL)
            with namespace.begin(NEW) as sequence:
                write(namespace, sequence, NEW)
            sandbox.until(
                lambda: "the movers: a thread has been in one job" in sandbox.log()[since:],
                "for a word",
            )
            wait_for_its_stacks(sandbox, since)
        sandbox.wait_for(NRestarts=before + 1, ActiveState="active")
        assert found(client) == ALL


def test_a_start_that_takes_longer_than_systemd_would_wait(sandbox: Sandbox) -> None:
    """The daemon asks for more time. Here the index is locked by somebody else meanwhile."""
    with sandbox.connect() as client:
        fill(client)
    sandbox.systemctl("stop", "tierkv")
    impatient = sandbox.path("/run/units/tierkv.service.d/impatient.conf")
    impatient.write_text(f"[Service]\nTimeoutStartSec={PATIENCE_S}\n")
    sandbox.systemctl("daemon-reload")
    with sandbox.path("/var/lib/tierkv/index/lock.mdb").open("r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX, 1)
        sandbox.systemctl("start", "--no-block", "tierkv")
        sandbox.until(lambda: "recovering" in sandbox.show("StatusText"), "for its status")
        began = time.monotonic()
        sandbox.until(lambda: time.monotonic() - began > PATIENCE_S)
        assert sandbox.show("ActiveState") == "activating"
        assert sandbox.get("/readyz") == (503, "recovering\n")
    sandbox.wait_for(ActiveState="active", NRestarts=0)
    with sandbox.connect() as client:
        assert found(client) == ALL
