"""Maps the pools that a worker uses before it touches them, in the background.

A page that exists, because the daemon took it, still takes a page fault when a process first uses
it: six times the time of copying it. Pages that do not exist are left alone: memory is the
daemon's to take.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

from tierkv.core.ids import U8
from tierkv.pages import backed_ranges, populate
from tierkv.threads import step_back

LOOK_S = 0.02
PATIENCE_S = 1.0
"""The thread follows the daemon while that takes memory, and ends when so long nothing was added.
"""


class Populator:
    """Background mapping of parts of ``data`` (u8 [n]), the mapping of the file ``fd``.

    It has a descriptor of its own.
    """

    def __init__(self, fd: int, data: U8) -> None:
        self._fd = os.dup(fd)
        self._data = data
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, os.close, self._fd).atexit = False

    @property
    def busy(self) -> bool:
        """Whether a part is still being mapped."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self, first: int, stop: int) -> None:
        """Map what there is of bytes ``first`` to ``stop``, and what is added while it works."""
        thread = threading.Thread(
            target=self._work, args=(first, stop), name="tierkv-populate", daemon=True
        )
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Let the threads end, within some milliseconds. Does not wait for them."""
        self._stopped.set()

    def _work(self, first: int, stop: int) -> None:
        step_back()  # the engine computes meanwhile
        given_up_s = time.monotonic() + PATIENCE_S
        # An older kernel or a full memory: pages are mapped when they are used.
        with contextlib.suppress(OSError):
            while first < stop and time.monotonic() < given_up_s and not self._stopped.is_set():
                for start, end in backed_ranges(self._fd, first, stop):
                    populate(self._data, start, end, self._stopped.is_set)
                    first = end
                    given_up_s = time.monotonic() + PATIENCE_S
                if first < stop:
                    self._stopped.wait(LOOK_S)
