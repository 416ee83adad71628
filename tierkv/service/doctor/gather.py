"""Gathers the facts of this machine. Changes nothing but a file of its own, which it removes."""

from __future__ import annotations

import glob
import os
import platform
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tierkv_kernels.cpu.build import LIBRARY
from tierkv_kernels.cuda.driver import Driver
from tierkv_kernels.errors import KernelError

from tierkv.config.ram import available_ram_bytes
from tierkv.config.resolve import bytes_below
from tierkv.config.schema import Config
from tierkv.native.loops import loops
from tierkv.service.doctor.facts import UNLIMITED, Facts, FileSystem
from tierkv.tiers.linux import takes_direct_io
from tierkv.tiers.uring import Ring

SYNCS = 60
SYNCING_S_MAX = 2.0
SYNCED_BYTES = 4096
COMMAND_S_MAX = 5.0

_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


def gather(config: Config) -> Facts:
    """The facts that matter to a daemon with this configuration, started as this process was."""
    state, disk = Path(config.server.state_dir), Path(config.disk.dir)
    return Facts(
        kernel=_kernel(platform.release()),
        ram_free_bytes=available_ram_bytes(),
        locked_bytes_max=_limit(resource.RLIMIT_MEMLOCK),
        open_files_max=_limit(resource.RLIMIT_NOFILE),
        shmem_huge=_chosen(_read(_SHMEM_HUGE)),
        state=_file_system(state),
        disk=_file_system(disk),
        arena=_file_system(Path(config.arena.dir)),
        sync_s=tuple(_sync_times(_nearest(state))),
        io_uring_missing=_io_uring_missing(),
        gpu_nodes={
            node: os.access(node, os.R_OK | os.W_OK) for node in sorted(glob.glob("/dev/nvidia*"))
        },
        gpu_driver_missing=_gpu_driver_missing(),
        native_missing=_native_missing(),
        attention_missing=_attention_missing(),
        systemd=_systemd_version(),
        clock_source=_read(_CLOCK_SOURCE).strip(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _kernel(release: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _limit(number: int) -> int:
    soft, _ = resource.getrlimit(number)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _chosen(words: str) -> str:
    """Of "always [advise] never" the one in brackets."""
    found = re.search(r"\[(\w+)\]", words)
    return found[1] if found else ""


def _nearest(directory: Path) -> Path:
    """The directory, or its nearest parent that exists and may be looked at."""
    while not os.access(directory, os.X_OK) and directory != directory.parent:
        directory = directory.parent
    return directory


def _file_system(directory: Path) -> FileSystem:
    there = _nearest(directory)
    space = os.statvfs(there)
    mount, kind, options = _mount(there)
    problem = ""
    if not os.access(there, os.W_OK):
        problem = f"{there} is not writable for this user"
    elif space.f_flag & os.ST_RDONLY:
        problem = f"{mount} is mounted read-only"
    return FileSystem(
        path=str(directory),
        kind=kind,
        options=options,
        mount=mount,
        free_bytes=space.f_bavail * space.f_frsize,
        capacity_bytes=space.f_blocks * space.f_frsize,
        own_bytes=bytes_below(str(directory), passed_over=OSError),  # it need not be ours
        problem=problem,
        direct_io=not problem and takes_direct_io(there),
    )


def _mount(directory: Path) -> tuple[str, str, tuple[str, ...]]:
    """Mount point, type and options of what a path lies on, from proc(5)'s mountinfo."""
    path = os.path.realpath(directory)
    best: tuple[str, str, tuple[str, ...]] = ("/", "unknown", ())
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        fields, kind, super_options = left.split(), right.split()[0], right.split()[-1]
        mount = fields[4].replace("\\040", " ")
        # The last one that fits covers those before it.
        if len(mount) >= len(best[0]) and (path + "/").startswith(mount.rstrip("/") + "/"):
            best = (mount, kind, (*fields[5].split(","), *super_options.split(",")))
    return best


def _sync_times(directory: Path) -> Iterator[float]:
    """How long the device takes to make a small write durable; nothing where none is allowed."""
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="tierkv-doctor-") as file:
            fd, payload = file.fileno(), os.urandom(SYNCED_BYTES)
            os.posix_fallocate(fd, 0, SYNCS * SYNCED_BYTES)
            os.fsync(fd)
            began = time.perf_counter()
            for number in range(SYNCS):
                started = time.perf_counter()
                os.pwrite(fd, payload, number * SYNCED_BYTES)
                os.fdatasync(fd)
                now = time.perf_counter()
                yield now - started
                if now - began > SYNCING_S_MAX:
                    return
    except OSError:
        return  # that the directory cannot be written to is a finding of its own


def _io_uring_missing() -> str:
    try:
        Ring().close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _gpu_driver_missing() -> str:
    try:
        Driver()
    except KernelError as error:
        return str(error)
    return ""


def _native_missing() -> str:
    return loops().missing


def _attention_missing() -> str:
    return "" if LIBRARY.exists() else f"{LIBRARY.name} was not compiled"


def _systemd_version() -> int:
    if not Path("/run/systemd/system").is_dir():
        return 0
    try:
        done = subprocess.run(
            ["systemctl", "--version"],
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.match(r"systemd (\d+)", done.stdout)
    return int(found[1]) if found else 0
