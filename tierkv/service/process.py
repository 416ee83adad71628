"""What the kernel says of a process: is it still the one we knew?"""

from __future__ import annotations

import os
from pathlib import Path

_THREADS_FIELD, _START_TIME_FIELD = 20, 22
"""In /proc/PID/stat, counted from 1 (proc(5))."""


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if there is no such process.

    Together with the pid it names a process for good: pids are reused, start times are not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The second field, the command, is in parentheses and may hold anything.
    fields = stat.rpartition(")")[2].split()
    state, threads, started = fields[0], fields[_THREADS_FIELD - 3], fields[_START_TIME_FIELD - 3]
    # Where only the first thread has ended it looks like a zombie, but the others may still write.
    return 0 if state in "ZX" and int(threads) <= 1 else int(started)


def is_alive(pid: int, started: int) -> bool:
    """Whether the process is still running. pid 0 (another pid namespace) counts as alive."""
    return pid == 0 or (started != 0 and start_time(pid) == started)


def boot_id() -> str:
    """Identity of this boot of the kernel: what lies on tmpfs is from this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if there can be none.

    Because it has ended, or because a sandbox forbids the call, or descriptors are short.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
