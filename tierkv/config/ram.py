"""How much memory this process may still take: of the machine's, and of its control groups'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

_KIB = 1024


def available_ram_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Memory that this process may take before anything must be swapped out or killed.

    What the kernel can drop at once (caches of files) counts as free. Of control groups, version
    2 is looked at. Raises OSError if ``proc`` is no /proc.
    """
    machine = _fields(proc / "meminfo", ":")["MemAvailable"] * _KIB
    return max(0, min([machine, *_left_in_groups(proc, cgroups)]))


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each group that this process is in, from its own to the root, has left."""
    group = _own_group(proc, cgroups)
    while group is not None:
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text())
                stat = _fields(group / "memory.stat", " ")
                yield int(limit) - used + stat["active_file"] + stat["inactive_file"]
        except (OSError, KeyError):
            pass  # the root has no limit, and others may not be ours to look at
        group = group.parent if group != cgroups else None


def _own_group(proc: Path, cgroups: Path) -> Path | None:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    # A path with ".." lies outside of what this process's namespace shows.
    return cgroups / paths[0].lstrip("/") if paths and ".." not in paths[0] else None


def _fields(path: Path, separator: str) -> dict[str, int]:
    pairs = (line.partition(separator) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in pairs if value.split()}
