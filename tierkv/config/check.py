"""Rules between settings, on a resolved configuration."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tierkv.config.paths import SOCKET_PATH_BYTES_MAX
from tierkv.config.resolve import Space
from tierkv.config.schema import Config
from tierkv.units import about_bytes

NUMA_WORDS = ("auto", "interleave", "off")


class Problem(NamedTuple):
    """What is wrong with a setting, and what to do."""

    key: str
    what: str
    advice: str


def check(config: Config, space: Callable[[str], Space]) -> Iterator[Problem]:
    """The problems of a resolved configuration on this machine."""
    yield from _check_paths(config)
    yield from _check_budgets(config, space)
    numa = config.arena.numa
    if numa not in NUMA_WORDS and not numa.isdecimal():
        yield Problem("arena.numa", f"is {numa!r}", f"write {', '.join(NUMA_WORDS)} or a number")
    if config.metrics.tcp:
        yield from _check_address(config.metrics.tcp)


def _check_paths(config: Config) -> Iterator[Problem]:
    server, metrics = config.server.socket, config.metrics.socket
    for key, path in (("server.socket", server), ("metrics.socket", metrics)):
        length = len(path.encode())
        if length > SOCKET_PATH_BYTES_MAX:
            what = f"{path} has {length} bytes, a socket's path at most {SOCKET_PATH_BYTES_MAX}"
            yield Problem(key, what, "choose a shorter path")
    if server == metrics:
        yield Problem("metrics.socket", "is server.socket as well", "choose another path")
    if config.arena.dir == config.disk.dir:
        yield Problem("arena.dir", "is disk.dir as well", "choose another directory")


def _check_budgets(config: Config, space: Callable[[str], Space]) -> Iterator[Problem]:
    if not config.device.bytes:
        free = about_bytes(space(config.arena.dir).free)
        what = f"0 B leave no room for blocks, and {config.arena.dir} has {free} free"
        yield Problem("device.bytes", what, "write 1 MiB or more, or choose another arena.dir")
    if config.arena.keep == "files":
        yield from _check_arena_files(config, space)
    if config.wal.durability == "power" and not config.disk.bytes:
        what = "is power, but without a disk tier no block survives power loss"
        yield Problem("wal.durability", what, "give disk.bytes some space, or choose kill")
    if config.disk.bytes:
        disk_total = space(config.disk.dir).total
        if config.disk.bytes > disk_total:
            what = (
                f"{about_bytes(config.disk.bytes)} do not fit: "
                f"{config.disk.dir} has {about_bytes(disk_total)}"
            )
            yield Problem("disk.bytes", what, "lower it, or choose another disk.dir")


def _check_arena_files(config: Config, space: Callable[[str], Space]) -> Iterator[Problem]:
    in_ram = {"host.bytes": config.host.bytes}
    if config.device.kind == "cpu":
        in_ram = {"device.bytes": config.device.bytes, **in_ram}
    ram_bytes, ram_total = sum(in_ram.values()), space(config.arena.dir).total
    if ram_bytes > ram_total:
        what = (
            f"{' and '.join(in_ram)} are {about_bytes(ram_bytes)} together, "
            f"but {config.arena.dir} has {about_bytes(ram_total)}"
        )
        yield Problem(next(iter(in_ram)), what, "lower them, or choose another arena.dir")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:9464" or "[::1]:9464".

    Raises ValueError if it is not a loopback address with a port.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not an address and a port")
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"{address!r} would be open to other machines")
    return host, int(port)


def _check_address(address: str) -> Iterator[Problem]:
    try:
        parse_address(address)
    except ValueError as error:
        yield Problem("metrics.tcp", str(error), "write a loopback one, such as 127.0.0.1:9464")
