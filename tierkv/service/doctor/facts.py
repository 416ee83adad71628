"""What the doctor wants to know of a machine, as plain values."""

from __future__ import annotations

import msgspec

UNLIMITED = -1
"""A limit that is none."""


class FileSystem(msgspec.Struct, kw_only=True, frozen=True):
    """The file system that holds a directory, or would.

    ``own_bytes`` are those that the directory occupies already. ``problem``: why the directory
    cannot be used, empty if it can; it is then its nearest parent that was looked at.
    """

    path: str
    kind: str = "ext4"
    options: tuple[str, ...] = ()
    mount: str = "/"
    free_bytes: int = 0
    capacity_bytes: int = 0
    own_bytes: int = 0
    problem: str = ""
    direct_io: bool = True


class Facts(msgspec.Struct, kw_only=True, frozen=True):
    """The machine and this process's limits. Texts that say why are empty if all is well.

    ``sync_s``: times of fdatasync after a small write in the log's directory. ``gpu_nodes``:
    device files of GPUs, and whether this user may open each.
    """

    kernel: tuple[int, int]
    ram_free_bytes: int
    locked_bytes_max: int
    open_files_max: int
    shmem_huge: str
    """The chosen word of transparent_hugepage/shmem_enabled; empty if there is none."""
    state: FileSystem
    disk: FileSystem
    arena: FileSystem
    sync_s: tuple[float, ...]
    io_uring_missing: str
    gpu_nodes: dict[str, bool]
    gpu_driver_missing: str
    native_missing: str
    attention_missing: str
    systemd: int
    """Its version; 0 where it does not run."""
    clock_source: str
