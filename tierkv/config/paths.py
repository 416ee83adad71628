"""Where a daemon and its workers meet when nobody says where: one rule for both sides."""

from __future__ import annotations

from collections.abc import Mapping

SYSTEM_STATE_DIR = "/var/lib/tierkv"
SYSTEM_SOCKET = "/run/tierkv/tierkv.sock"

SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: sun_path has 108 bytes with the closing zero (unix(7))."""


def home(variables: Mapping[str, str]) -> str:
    """The user's home directory."""
    return variables.get("HOME") or "/"


def own_state_dir(uid: int, variables: Mapping[str, str]) -> str:
    """State directory of a daemon that this user starts."""
    if uid == 0:
        return SYSTEM_STATE_DIR
    state_home = variables.get("XDG_STATE_HOME")
    return f"{state_home or home(variables).rstrip('/') + '/.local/state'}/tierkv"


def own_socket(uid: int, variables: Mapping[str, str], state_dir: str) -> str:
    """Socket of a daemon that this user starts."""
    if uid == 0:
        return SYSTEM_SOCKET
    runtime_dir = variables.get("XDG_RUNTIME_DIR")
    return f"{runtime_dir}/tierkv/tierkv.sock" if runtime_dir else f"{state_dir}/tierkv.sock"
