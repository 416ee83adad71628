"""On which NUMA nodes the memory of the RAM tiers lies.

The kernel keeps the policy of shared memory with the file. So it holds for whoever touches a page
first, daemon or worker; pages that exist stay where they are.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from tierkv.core.ids import U8
from tierkv.errors import ConfigError
from tierkv.pages import check, libc

AUTO, OFF, INTERLEAVE = "auto", "off", "interleave"

_MPOL_PREFERRED = 1  # linux/mempolicy.h
_MPOL_INTERLEAVE = 3
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call, which the C library does not offer."""


class NodePolicy(NamedTuple):
    """Pages go to ``nodes`` by turns, or to the only one while it has room."""

    nodes: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ",".join(str(node) for node in self.nodes)
        return f"interleave {numbers}" if len(self.nodes) > 1 else f"node {numbers}"

    def apply(self, mapped: U8) -> None:
        """Let the shared memory behind a mapping (u8 [n], from a page on) follow the policy.

        Raises OSError: ENOSYS where the kernel or the machine has no such thing.
        """
        mask = sum(1 << node for node in self.nodes)
        words = max(self.nodes) // 64 + 1
        array = (ctypes.c_uint64 * words).from_buffer_copy(mask.to_bytes(8 * words, "little"))
        mode = _MPOL_INTERLEAVE if len(self.nodes) > 1 else _MPOL_PREFERRED
        check(
            libc().syscall(
                ctypes.c_long(_MBIND.get(platform.machine(), -1)),
                ctypes.c_void_p(mapped.ctypes.data),
                ctypes.c_ulong(mapped.nbytes),
                ctypes.c_long(mode),
                array,
                ctypes.c_ulong(64 * words + 1),  # the kernel takes one bit less
                ctypes.c_ulong(0),
            )
        )


def choose(setting: str, nodes: Collection[int]) -> NodePolicy | None:
    """What ``arena.numa`` means on a machine with these nodes; None: whoever touches a page first.

    Raises ConfigError for a node that is not there.
    """
    if setting == OFF or (len(nodes) < 2 and setting in (AUTO, INTERLEAVE)):
        return None
    if setting in (AUTO, INTERLEAVE):
        return NodePolicy(tuple(sorted(nodes)))
    node = int(setting) if setting.isdecimal() else -1
    if node not in nodes:
        known = ", ".join(str(one) for one in sorted(nodes))
        raise ConfigError(
            f"arena.numa is {setting}, but the nodes that this process may use are {known}; write"
            f" one of them, {INTERLEAVE}, {AUTO} or {OFF}"
        )
    return NodePolicy((node,))


def memory_nodes(
    system: Path = Path("/sys/devices/system/node"), process: Path = Path("/proc/self/status")
) -> frozenset[int]:
    """The nodes with memory that this process may use; one, 0, where the kernel knows no nodes."""
    try:
        nodes = parse_nodes((system / "has_memory").read_text())
    except OSError:
        return frozenset({0})
    for line in process.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            nodes &= parse_nodes(value)
    return nodes or frozenset({0})


def parse_nodes(text: str) -> frozenset[int]:
    """The numbers in a list as the kernel writes it: "0-1,4"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
