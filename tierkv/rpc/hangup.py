"""Notices that a peer has gone while nobody reads from it.

A paused transport does not see end-of-file, so the death of a worker with a full queue of
requests would go unnoticed until one of them is answered.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class HangupWatcher:
    """One epoll instance of hang-up events alone, itself watched by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._wake)

    def watch(self, fd: int, gone: Callable[[], None]) -> None:
        """Call ``gone`` once when the peer of ``fd`` hangs up, even if it already has."""
        self._callbacks[fd] = gone
        self._epoll.register(fd, select.EPOLLRDHUP)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; does nothing if it is not watched. Call before it is closed."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Watch nothing any more."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._callbacks.clear()

    def _wake(self) -> None:
        for fd, _ in self._epoll.poll(0):
            gone = self._callbacks.get(fd)
            self.forget(fd)
            if gone is not None:
                gone()
