"""A screen that is drawn again and again until a key ends it: ``top``, ``status --watch``."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, RenderableType
from rich.live import Live

QUIT = ("q", "Q", "\x03", "\x04", "\x1b")
"""q, Ctrl-C, Ctrl-D and Escape (also the beginning of every arrow key)."""


def show(
    look: Callable[[], None],
    draw: Callable[[], RenderableType],
    pressed: Callable[[str], None],
    interval_s: float,
) -> None:
    """Look, draw, and do so again after an interval, or only draw after a key that was pressed.

    Standard input and output must be a terminal. Ctrl-C is as good an end as any.
    """
    console = Console(file=sys.stdout)
    with (
        suppress(KeyboardInterrupt),
        keyboard() as key,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            next_s = time.monotonic() + interval_s
            look()
            live.update(draw(), refresh=True)
            while (left_s := next_s - time.monotonic()) > 0:
                name = key(left_s)
                if name in QUIT:
                    return
                if name:
                    pressed(name)
                    live.update(draw(), refresh=True)


@contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """Keys at once and unseen: ``key(timeout_s)`` is the next one, or "" if there was none."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def key(timeout_s: float) -> str:
        if not select.select([fd], [], [], timeout_s)[0]:
            return ""
        # At the end of the terminal there is nothing to read any more: that quits, too.
        return os.read(fd, 1).decode("latin-1") or "\x04"

    try:
        tty.setcbreak(fd)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
