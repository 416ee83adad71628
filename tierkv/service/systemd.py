"""What systemd wants: sd_notify(3) messages, and the descriptors it passes, sd_listen_fds(3)."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

LISTEN_FDS_START = 3

SEND_S = 0.25
"""A manager that does not read for so long is not told; nothing else may wait for it."""

STORE_S = 5.0
"""How long a manager may take for what must not be lost."""


class Inherited(NamedTuple):
    """A descriptor that the service manager passed on. ``name`` is empty if it gave none."""

    name: str
    fd: int


class Notifier:
    """Tells the service manager how we are; does nothing where there is none."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *lines: str) -> None:
        """Send assignments such as READY=1. A manager that is gone is no reason to fail."""
        if self._address:
            with contextlib.suppress(OSError):
                self._send(lines, (), SEND_S)

    def hand_over(self, *lines: str, fds: Sequence[int] = ()) -> None:
        """Send assignments that must not be lost, and copies of descriptors with them.

        Raises OSError. What the manager thinks of them it does not say.
        """
        self._send(lines, fds, STORE_S)

    def wait_until_done(self) -> None:
        """Return when the manager has done all that it was told. Raises OSError."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                # It closes the pipe once everything before it was dealt with.
                self._send(["BARRIER=1"], [theirs], STORE_S)
            finally:
                os.close(theirs)
            waiting = select.poll()
            waiting.register(ours, 0)
            if not waiting.poll(STORE_S * 1000):
                raise OSError(errno.ETIMEDOUT, "the service manager does not answer")
        finally:
            os.close(ours)

    def _send(self, lines: Iterable[str], fds: Sequence[int], timeout_s: float) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(timeout_s)
            sock.connect(self._address)
            socket.send_fds(sock, ["\n".join(lines).encode()], list(fds))


def inherited_descriptors(environment: Mapping[str, str]) -> list[Inherited]:
    """All descriptors that systemd passed to this process, in its order; no child gets them.

    Call once: whoever calls owns them.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(environment.get("LISTEN_FDS", "0"))
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    names += [""] * (count - len(names))
    found = [Inherited(names[at], LISTEN_FDS_START + at) for at in range(count)]
    for one in found:
        os.set_inheritable(one.fd, False)
    return found


def take_socket(
    inherited: list[Inherited], name: str, *, or_any: bool = False
) -> socket.socket | None:
    """The listening socket that systemd opened for us and calls ``name``, or None.

    (FileDescriptorName=.) With ``or_any`` the first one if none is called so. Removes it from
    ``inherited``.
    """
    sockets = [one for one in inherited if stat.S_ISSOCK(os.fstat(one.fd).st_mode)]
    chosen = next((one for one in sockets if one.name == name), None)
    if chosen is None and or_any and sockets:
        chosen = sockets[0]
    if chosen is None:
        return None
    inherited.remove(chosen)
    return socket.socket(fileno=chosen.fd)
