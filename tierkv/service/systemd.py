"""What systemd wants: sd_notify messages and inherited sockets (sd_notify(3), sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

LISTEN_FDS_START = 3

SEND_S = 0.25
"""A manager that does not read for so long is not told; nothing else may wait for it."""


class Notifier:
    """Tells the service manager how we are; does nothing where there is none."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *lines: str) -> None:
        """Send assignments such as READY=1. A manager that is gone is no reason to fail."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(SEND_S)
            try:
                sock.connect(self._address)
                sock.send("\n".join(lines).encode())
            except OSError:
                return


def inherited_socket(environment: Mapping[str, str], name: str = "rpc") -> socket.socket | None:
    """The listening socket that systemd opened for us, or None.

    With several sockets, the one called ``name`` (FileDescriptorName=), else the first.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = int(environment.get("LISTEN_FDS", "0"))
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    if count < 1:
        return None
    at = names.index(name) if name in names[:count] else 0
    fd = LISTEN_FDS_START + at
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
