"""NUMA: which nodes there are, what a setting means on them, and that the kernel is told."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import ConfigError
from tierkv.tiers.numa import NodePolicy, choose, memory_nodes, parse_nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", {0}), ("0-1,4", {0, 1, 4}), ("2-3\n", {2, 3}), ("\n", set()), ("", set())],
)
def test_lists_of_nodes_are_read(text: str, nodes: set[int]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize(
    ("has_memory", "allowed", "nodes"),
    [("0-3", "0-3", {0, 1, 2, 3}), ("0,2", "0-1", {0}), ("0-1", "1", {1}), ("0", "0", {0})],
)
def test_nodes_have_memory_that_the_process_may_use(
    tmp_path: Path, has_memory: str, allowed: str, nodes: set[int]
) -> None:
    (tmp_path / "has_memory").write_text(has_memory + "\n")
    (tmp_path / "status").write_text(f"Name:\tx\nMems_allowed:\tf\nMems_allowed_list:\t{allowed}\n")
    assert memory_nodes(tmp_path, tmp_path / "status") == nodes


def test_a_kernel_without_nodes_counts_as_one(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path / "none", tmp_path / "none") == {0}


def test_this_machine_has_a_node() -> None:
    assert memory_nodes()


@pytest.mark.parametrize(
    ("setting", "nodes", "policy"),
    [
        ("auto", {0}, None),
        ("auto", {0, 1}, NodePolicy((0, 1))),
        ("auto", {1, 3, 0}, NodePolicy((0, 1, 3))),
        ("interleave", {2}, None),
        ("interleave", {0, 2}, NodePolicy((0, 2))),
        ("off", {0, 1}, None),
        ("1", {0, 1}, NodePolicy((1,))),
        ("0", {0}, NodePolicy((0,))),
    ],
)
def test_settings(setting: str, nodes: set[int], policy: NodePolicy | None) -> None:
    assert choose(setting, nodes) == policy


@pytest.mark.parametrize("setting", ["2", "both", ""])
def test_a_node_that_is_not_there_is_a_typed_error(setting: str) -> None:
    with pytest.raises(ConfigError, match="this process may use are 0, 1"):
        choose(setting, {0, 1})


def test_policies_have_names() -> None:
    assert str(NodePolicy((0, 1))) == "interleave 0,1"
    assert str(NodePolicy((5,))) == "node 5"


@pytest.mark.may_skip_in_ci  # a sandbox may forbid the call, and a kernel may be built without it
def test_the_kernel_is_told() -> None:
    size_bytes = 64 << 10
    mapping = mmap.mmap(-1, size_bytes)
    mapped = np.frombuffer(mapping, np.uint8)
    try:
        NodePolicy((0,)).apply(mapped)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            pytest.skip(f"no mbind here: {error}")
        raise
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    ours = [line for line in maps if line.startswith(f"{mapped.ctypes.data:x} ")]
    assert len(ours) == 1
    assert ours[0].split()[1] == "prefer:0"


def test_a_node_that_the_kernel_lacks_is_an_os_error() -> None:
    mapping = mmap.mmap(-1, 4096)
    with pytest.raises(OSError, match=r"Invalid argument|not implemented|not permitted"):
        NodePolicy((900,)).apply(np.frombuffer(mapping, np.uint8))
