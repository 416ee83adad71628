"""The socket's file mode lets in; ``server.allowed_uids`` keeps out."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.service.raw import Peer
from tests.service.running import Daemon, running
from tierkv.rpc.messages import Failure

STRANGER_UID = STRANGER_GID = 54_321

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def connects_as(daemon: Daemon, uid: int, gid: int) -> str:
    """What the daemon says to a process of this user and group: its state, or an error's code."""

    def connect() -> str:
        with Peer(daemon) as peer:
            opening = peer.opening
        return opening.code if isinstance(opening, Failure) else opening.state

    return as_user(uid, gid, connect)


def as_user(uid: int, gid: int, act: Callable[[], str]) -> str:
    """What ``act`` returns in a process of this user and group, or the error's class."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            said = act()
        except BaseException as error:
            said = type(error).__name__
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_without_a_list_the_sockets_mode_decides() -> None:
    with running() as daemon:
        daemon.folder.chmod(0o755)
        group = daemon.socket.stat().st_gid
        assert daemon.socket.stat().st_mode & 0o777 == 0o660
        assert daemon.state.stat().st_mode & 0o777 == 0o700
        assert connects_as(daemon, STRANGER_UID, group) == "serving"
        assert connects_as(daemon, STRANGER_UID, STRANGER_GID) == "PermissionError"


def test_a_list_restricts_further() -> None:
    settings = {
        "server.allowed_uids": f"[{STRANGER_UID}]",
        "server.operator_uids": f"[{STRANGER_UID + 2}]",
    }
    with running(settings) as daemon:
        daemon.folder.chmod(0o755)
        group = daemon.socket.stat().st_gid
        assert connects_as(daemon, STRANGER_UID, group) == "serving"
        # Operators and the daemon's own user must be able to operate it.
        assert connects_as(daemon, STRANGER_UID + 2, group) == "serving"
        assert connects_as(daemon, os.geteuid(), group) == "serving"
        assert connects_as(daemon, STRANGER_UID + 1, group) == "not_owner"
        assert connects_as(daemon, STRANGER_UID, STRANGER_GID) == "PermissionError"
