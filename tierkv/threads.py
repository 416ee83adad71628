"""Who goes first where threads want one CPU."""

from __future__ import annotations

import contextlib
import os
import threading

NICE = 10
"""Added to the niceness of threads that move bytes: latency is the others', throughput theirs."""


def step_back() -> None:
    """Let the process' other threads go first. Called on a thread that moves or maps bytes.

    Its share stays a tenth at least, so that nobody waits for ever.
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
