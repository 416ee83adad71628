"""From "auto" to concrete values: the one place that knows what "auto" stands for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from msgspec.structs import replace

from tierkv.config.paths import home, own_socket, own_state_dir
from tierkv.config.ram import available_ram_bytes
from tierkv.config.schema import AUTO, AUTO_BYTES, Config, PrefaultSetting
from tierkv.errors import ConfigError
from tierkv.units import GiB, MiB

DEVICE_SHARE = 0.4
HOST_SHARE = 0.1
DISK_SHARE = 0.5
DISK_BYTES_MAX = 64 * GiB

ARENA_FDS = tuple(
    f"tierkv-{tier}.{part}" for tier in ("device", "host") for part in ("arena", "table")
)
"""The arenas of the RAM tiers, as a service manager's descriptor store calls their parts."""


class Space(NamedTuple):
    """Bytes of the file system that holds a path; ``own`` are those below the path itself.

    What a directory of ours already holds counts as free: a restart must come to the same sizes.
    """

    total: int
    free: int
    own: int


class Environment(NamedTuple):
    """All that automatic values depend on."""

    uid: int
    variables: Mapping[str, str]
    working_dir: str
    ram_free_bytes: int
    space: Callable[[str], Space]
    recorded: Callable[[str], Mapping[str, int]] = lambda _state_dir: {}
    """Sizes that the store in a state directory was made with, by key ("device.bytes").

    An automatic size is decided once: if it followed today's free memory, the RAM tiers of
    yesterday's daemon would not fit and be lost.
    """


def this_environment(
    recorded: Callable[[str], Mapping[str, int]] = lambda _state_dir: {},
) -> Environment:
    """The environment of this process."""
    return Environment(
        uid=os.getuid(),
        variables=dict(os.environ),
        working_dir=str(Path.cwd()),
        ram_free_bytes=available_ram_bytes(),
        space=_space,
        recorded=recorded,
    )


def resolve(config: Config, environment: Environment) -> Config:
    """The same configuration with absolute paths and without a single "auto".

    Pure: all it knows of the machine comes from ``environment``.
    """
    state_dir = _absolute(
        config.server.state_dir, own_state_dir(environment.uid, environment.variables), environment
    )
    own = own_socket(environment.uid, environment.variables, state_dir)
    socket = _absolute(config.server.socket, own, environment)
    arena_keep = _arena_keep(config.arena.keep, environment.variables)
    arena_dir = _absolute(config.arena.dir, _auto_arena_dir(state_dir), environment)
    disk_dir = _absolute(config.disk.dir, f"{state_dir}/data", environment)
    metrics_socket = config.metrics.socket
    if metrics_socket:
        beside = str(PurePosixPath(socket).with_name("metrics.sock"))
        metrics_socket = _absolute(metrics_socket, beside, environment)

    if config.device.kind == "cuda" and config.device.bytes == AUTO_BYTES:
        raise ConfigError(
            'device.bytes is "auto", but device.kind is "cuda": write how much memory of the GPU '
            "the device tier may have, for nobody knows how much the engines need"
        )
    recorded = environment.recorded(state_dir)
    device_bytes = _recorded(config.device.bytes, recorded, "device.bytes")
    host_bytes = _recorded(config.host.bytes, recorded, "host.bytes")
    if AUTO_BYTES in (device_bytes, host_bytes):
        ram_bytes = environment.ram_free_bytes
        if arena_keep == "files":
            space = environment.space(arena_dir)
            ram_bytes = min(space.free, ram_bytes) + space.own
        device_bytes = _automatic(device_bytes, int(DEVICE_SHARE * ram_bytes))
        host_bytes = _automatic(host_bytes, int(HOST_SHARE * ram_bytes))
    disk_bytes = _recorded(config.disk.bytes, recorded, "disk.bytes")
    if disk_bytes == AUTO_BYTES:
        space = environment.space(disk_dir)
        share = int(DISK_SHARE * (space.free + space.own))
        disk_bytes = _automatic(disk_bytes, min(share, DISK_BYTES_MAX))
    segment_bytes = config.disk.segment_bytes
    if disk_bytes:
        segment_bytes = min(segment_bytes, disk_bytes)

    return replace(
        config,
        server=replace(config.server, socket=socket, state_dir=state_dir),
        device=replace(config.device, bytes=device_bytes),
        host=replace(config.host, bytes=host_bytes),
        arena=replace(
            config.arena, keep=arena_keep, dir=arena_dir, prefault=_arena_prefault(config)
        ),
        disk=replace(config.disk, dir=disk_dir, bytes=disk_bytes, segment_bytes=segment_bytes),
        metrics=replace(config.metrics, socket=metrics_socket),
    )


def _recorded(size_bytes: int, recorded: Mapping[str, int], key: str) -> int:
    return recorded.get(key, size_bytes) if size_bytes == AUTO_BYTES else size_bytes


def _automatic(size_bytes: int, auto_bytes: int) -> int:
    return auto_bytes // MiB * MiB if size_bytes == AUTO_BYTES else size_bytes


def _absolute(path: str, auto_path: str, environment: Environment) -> str:
    if path == AUTO:
        return auto_path
    if path == "~" or path.startswith("~/"):
        path = home(environment.variables) + path[1:]
    return os.path.normpath(PurePosixPath(environment.working_dir) / path)


def _auto_arena_dir(state_dir: str) -> str:
    return f"/dev/shm/tierkv-{hashlib.blake2s(state_dir.encode(), digest_size=6).hexdigest()}"


def _arena_keep(keep: str, variables: Mapping[str, str]) -> str:
    if keep != AUTO:
        return keep
    granted = variables.get("FDSTORE", "")
    kept = variables.get("LISTEN_FDNAMES", "").split(":")
    offered = granted.isdecimal() and int(granted) >= len(ARENA_FDS)
    offered = offered or not set(kept).isdisjoint(ARENA_FDS)
    return "manager" if offered and variables.get("NOTIFY_SOCKET") else "files"


def _arena_prefault(config: Config) -> PrefaultSetting:
    """Half of a machine's memory is not to be taken at once if nobody asked for that much."""
    if config.arena.prefault != "auto":
        return config.arena.prefault
    sizes = {config.host.bytes}
    if config.device.kind == "cpu":
        sizes.add(config.device.bytes)
    return "on" if sizes != {AUTO_BYTES} else "off"


def _space(path: str) -> Space:
    place = Path(path)
    try:
        while not place.exists():
            place = place.parent
        found = os.statvfs(place)
    except PermissionError as error:
        raise ConfigError(
            f"{path}: this user may not look there; "
            "run this as the daemon's user, or choose another directory"
        ) from error
    return Space(
        total=found.f_blocks * found.f_frsize,
        free=found.f_bavail * found.f_frsize,
        own=bytes_below(path),
    )


def bytes_below(path: str, passed_over: type[OSError] = FileNotFoundError) -> int:
    """Bytes that the files below a directory occupy; 0 if there is none.

    A file that cannot be looked at for a reason that is ``passed_over`` does not count.
    """
    own = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                own += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except passed_over:
                continue  # most often a running daemon has just removed it
    return own
