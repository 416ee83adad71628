"""How much memory may still be taken, on machines that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.config.ram import available_ram_bytes
from tierkv.units import GiB, MiB


def machine(tmp_path: Path, cgroup: str, groups: dict[str, tuple[str, int, int]]) -> int:
    """Free bytes with 10 GiB available. ``groups``: limit, usage and cached files by path."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {20 * GiB // 1024} kB\nMemAvailable: {10 * GiB // 1024} kB\nHugePages_Free: 0\n"
    )
    (proc / "self/cgroup").write_text(cgroup)
    root.mkdir()
    for path, (limit, used, cached) in groups.items():
        group = root / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(
            f"anon 0\nfile 99999\nactive_file {cached}\ninactive_file 5\n"
        )
    return available_ram_bytes(proc, root)


@pytest.mark.parametrize(
    ("cgroup", "groups", "free"),
    [
        ("0::/\n", {}, 10 * GiB),
        ("4:memory:/old\n", {}, 10 * GiB),
        ("0::/a/b\n", {"a/b": ("max", 1, 0)}, 10 * GiB),
        ("0::/a/b\n", {"a/b": (str(4 * GiB), 3 * GiB, 0)}, GiB + 5),
        ("0::/a/b\n", {"a/b": (str(4 * GiB), 3 * GiB, MiB)}, GiB + MiB + 5),
        ("0::/a/b\n", {"a": (str(4 * GiB), 3 * GiB, 0), "a/b": ("max", GiB, 0)}, GiB + 5),
        ("0::/\n", {"": (str(2 * GiB), GiB, 0)}, GiB + 5),
        ("0::/a\n", {"a": (str(GiB), 2 * GiB, 0)}, 0),
        ("0::/a\n", {"a": (str(99 * GiB), 0, 0)}, 10 * GiB),
        ("0::/../outside\n", {"": (str(GiB), 0, 0)}, 10 * GiB),
    ],
)
def test_the_tightest_limit_counts_and_cached_files_are_free(
    tmp_path: Path, cgroup: str, groups: dict[str, tuple[str, int, int]], free: int
) -> None:
    assert machine(tmp_path, cgroup, groups) == free


def test_this_machine_has_memory() -> None:
    assert available_ram_bytes() > MiB
