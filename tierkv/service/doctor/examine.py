"""Judges the facts: what is right, what costs something, what will not work, and what to do.

No I/O here. Every check is a function of a configuration and the facts; it yields its findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from tierkv.config.schema import Config
from tierkv.service.doctor.facts import UNLIMITED, Facts, FileSystem
from tierkv.units import GiB, MiB, about_bytes, about_duration

Verdict = Literal["ok", "warn", "fail"]

KERNEL_MIN = (5, 14)
"""MADV_POPULATE_WRITE, by which memory is taken ahead of need."""

SLOW_SYNC_S = 0.02
SPARE_FILES = 256
"""Descriptors beside those of connections: files of the store, rings, pages, logs."""
FILES_PER_CONNECTION = 2
"""A socket and its scratch memory."""
LOG_SEGMENTS = 4
"""Segments that the log may take: the current one, a spare, and those of a checkpoint."""
SYSTEMD_KEEPS_DESCRIPTORS = 233
"""From this version on FDPOLL=0 keeps a descriptor whatever its state."""
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse", "fuse.sshfs")


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One fact judged. ``means``: what follows from it; ``fix``: the line that changes it."""

    check: str
    verdict: Verdict
    found: str
    means: str = ""
    fix: str = ""


class Diagnosis(msgspec.Struct, kw_only=True, frozen=True):
    """All findings, and the worst verdict among them."""

    verdict: Verdict
    findings: list[Finding]


Check = Callable[[Config, Facts], Iterator[Finding]]


def examine(config: Config, facts: Facts) -> Diagnosis:
    """Judge this machine for a daemon with this configuration."""
    findings = [finding for check in CHECKS for finding in check(config, facts)]
    verdicts = {finding.verdict for finding in findings}
    worst: Verdict = "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
    return Diagnosis(verdict=worst, findings=findings)


def _kernel(config: Config, facts: Facts) -> Iterator[Finding]:
    found = "Linux {}.{}".format(*facts.kernel)
    if facts.kernel >= KERNEL_MIN:
        yield Finding(check="kernel", verdict="ok", found=found)
    else:
        yield Finding(
            check="kernel",
            verdict="warn",
            found=found,
            means="memory cannot be taken ahead of need, so first writes are ten times slower",
            fix="install Linux {}.{} or newer".format(*KERNEL_MIN),
        )


def _open_files(config: Config, facts: Facts) -> Iterator[Finding]:
    limit = facts.open_files_max
    needed = config.server.connections_max * FILES_PER_CONNECTION + SPARE_FILES
    found = "no limit" if limit == UNLIMITED else f"{limit:,} open files"
    if limit == UNLIMITED or limit >= needed:
        yield Finding(check="open files", verdict="ok", found=found)
        return
    yield Finding(
        check="open files",
        verdict="warn",
        found=found,
        means=f"{config.server.connections_max:,} connections (server.connections_max) may need "
        f"{needed:,}; beyond the limit workers wait",
        fix=f"ulimit -n {needed}    # or LimitNOFILE={needed} in the unit",
    )


def _locked_memory(config: Config, facts: Facts) -> Iterator[Finding]:
    limit = facts.locked_bytes_max
    found = "no limit" if limit == UNLIMITED else about_bytes(limit)
    if limit == UNLIMITED or config.device.kind != "cuda" or limit >= config.host.bytes:
        yield Finding(check="locked memory", verdict="ok", found=found)
        return
    yield Finding(
        check="locked memory",
        verdict="warn",
        found=found,
        means=f"the host tier's {about_bytes(config.host.bytes)} may not be pinned, and copies to "
        "the GPU take twice as long",
        fix="ulimit -l unlimited    # or LimitMEMLOCK=infinity in the unit",
    )


def _memory(config: Config, facts: Facts) -> Iterator[Finding]:
    wanted = config.host.bytes + (config.device.bytes if config.device.kind == "cpu" else 0)
    free = facts.ram_free_bytes + (facts.arena.own_bytes if config.arena.keep == "files" else 0)
    found = f"{about_bytes(wanted)} for the RAM tiers, {about_bytes(free)} free"
    if wanted <= free:
        yield Finding(check="memory", verdict="ok", found=found)
        return
    yield Finding(
        check="memory",
        verdict="fail",
        found=found,
        means="the daemon or the engines beside it will be killed when the tiers fill",
        fix=f"tierkv serve --device-bytes {max(1, free * 2 // 5 // MiB)}MiB "
        f"--host-bytes {max(1, free // 10 // MiB)}MiB    # or device.bytes, host.bytes",
    )


def _huge_pages(config: Config, facts: Facts) -> Iterator[Finding]:
    if config.arena.keep == "files":
        offered = next((o for o in facts.arena.options if o.startswith("huge=")), "huge=never")
        fix = f"mount -o remount,huge=advise {facts.arena.mount}"
        found = f"{facts.arena.mount} has {offered}"
        good = offered not in ("huge=never", "huge=deny")
    else:
        fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        found = f"shmem_enabled is {facts.shmem_huge or 'not there'}"
        good = facts.shmem_huge not in ("", "never", "deny")
    if good:
        yield Finding(check="huge pages", verdict="ok", found=found)
        return
    yield Finding(
        check="huge pages",
        verdict="warn",
        found=found,
        means="taking memory is ten times dearer, and writes to disk are a quarter slower",
        fix=fix,
    )


def _arena(config: Config, facts: Facts) -> Iterator[Finding]:
    if config.arena.keep != "files":
        return
    place, wanted = facts.arena, config.host.bytes
    if config.device.kind == "cpu":
        wanted += config.device.bytes
    room = place.free_bytes + place.own_bytes
    found = f"{place.path} on {place.kind}, {about_bytes(room)} for it"
    if place.problem:
        yield _unusable("arena", "arena.dir", place)
    elif place.kind not in ("tmpfs", "ramfs"):
        yield Finding(
            check="arena",
            verdict="warn",
            found=found,
            means="it is no RAM file system: the kernel writes the RAM tiers to a drive",
            fix='TIERKV_ARENA__DIR=/dev/shm/tierkv    # or arena.dir = "/dev/shm/tierkv"',
        )
    elif room < wanted:
        size_gib = -(-(wanted + place.capacity_bytes - place.free_bytes) // GiB)
        yield Finding(
            check="arena",
            verdict="fail",
            found=found,
            means=f"the RAM tiers are {about_bytes(wanted)}: a write beyond the room kills "
            "whoever writes",
            fix=f"mount -o remount,size={size_gib}G {place.mount}",
        )
    else:
        yield Finding(check="arena", verdict="ok", found=found)


def _disk(config: Config, facts: Facts) -> Iterator[Finding]:
    log_bytes = LOG_SEGMENTS * config.wal.segment_bytes
    for check, key, place, wanted in (
        ("state", "server.state_dir", facts.state, log_bytes),
        ("disk", "disk.dir", facts.disk, config.disk.bytes),
    ):
        if check == "disk" and not wanted:
            yield Finding(check="disk", verdict="ok", found="no disk tier")
            continue
        if place.problem:
            yield _unusable(check, key, place)
            continue
        yield _kind_of(check, key, place)
        room = place.free_bytes + place.own_bytes
        found = f"{about_bytes(wanted)} wanted in {place.path}, {about_bytes(room)} there"
        if wanted <= room:
            yield Finding(check=f"{check} room", verdict="ok", found=found)
        else:
            yield Finding(
                check=f"{check} room",
                verdict="fail",
                found=found,
                means="the disk fills up; then nothing more is kept there",
                fix=f"tierkv serve --disk-bytes {max(1, room // 2 // MiB)}MiB    # or {key} "
                "on a larger one",
            )
    if config.disk.bytes and not facts.disk.problem:
        yield _direct(facts.disk)


def _unusable(check: str, key: str, place: FileSystem) -> Finding:
    return Finding(
        check=check,
        verdict="fail",
        found=place.problem,
        means=f"the daemon cannot use {place.path} ({key})",
        fix=f"install -d -o tierkv -g tierkv {place.path}    # or run as the daemon's user",
    )


def _kind_of(check: str, key: str, place: FileSystem) -> Finding:
    found = f"{place.path} on {place.kind}"
    if place.kind in ("tmpfs", "ramfs"):
        means = "it is RAM: what is there does not survive the machine's end"
    elif place.kind in NETWORK_FILE_SYSTEMS:
        means = "syncs and locks over a network may be slow, or promise less than they do"
    else:
        return Finding(check=check, verdict="ok", found=found)
    return Finding(
        check=check,
        verdict="warn",
        found=found,
        means=means,
        fix=f'{key} = "/a/directory/on/a/local/drive"',
    )


def _direct(place: FileSystem) -> Finding:
    if place.direct_io:
        return Finding(check="direct I/O", verdict="ok", found=f"{place.kind} takes it")
    return Finding(
        check="direct I/O",
        verdict="warn",
        found=f"{place.kind} does not take it",
        means="blocks go through the page cache, which takes memory and a copy",
        fix='disk.dir = "/a/directory/on/ext4/or/xfs"',
    )


def _sync(config: Config, facts: Facts) -> Iterator[Finding]:
    if not facts.sync_s:
        return  # that it cannot be written to is said already
    times = sorted(facts.sync_s)
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    found = f"fdatasync p50 {about_duration(p50)}, p99 {about_duration(p99)}"
    if p99 <= SLOW_SYNC_S:
        yield Finding(check="disk sync", verdict="ok", found=found)
        return
    power = config.wal.durability == "power"
    yield Finding(
        check="disk sync",
        verdict="warn" if power else "ok",
        found=found,
        means='with durability = "power" every seal waits so long'
        if power
        else "slow, but only durability = power would wait for it",
        fix="tierkv serve --durability kill    # or a drive with power-loss protection"
        if power
        else "",
    )


def _io_uring(config: Config, facts: Facts) -> Iterator[Finding]:
    if not facts.io_uring_missing or config.disk.io == "threads" or not config.disk.bytes:
        found = facts.io_uring_missing or "allowed"
        yield Finding(check="io_uring", verdict="ok", found=found)
        return
    yield Finding(
        check="io_uring",
        verdict="fail" if config.disk.io == "uring" else "warn",
        found=facts.io_uring_missing,
        means="a few threads read from disk instead, at a part of the speed",
        fix="sysctl -w kernel.io_uring_disabled=0    # in a container: allow it in seccomp",
    )


def _gpu(config: Config, facts: Facts) -> Iterator[Finding]:
    wanted = config.device.kind == "cuda"
    forbidden = [node for node, usable in facts.gpu_nodes.items() if not usable]
    if wanted and not facts.gpu_nodes:
        yield Finding(
            check="GPU",
            verdict="fail",
            found="no /dev/nvidia*",
            means='device.kind is "cuda", but this process sees no GPU',
            fix="nvidia-smi    # makes the nodes; in a container: --gpus all",
        )
    elif wanted and forbidden:
        yield Finding(
            check="GPU",
            verdict="fail",
            found=f"{', '.join(forbidden)} not usable by this user",
            means="the device tier cannot be made",
            fix=f"chmod 0666 {' '.join(forbidden)}    # or add the daemon's user to their group",
        )
    elif wanted and facts.gpu_driver_missing:
        yield Finding(
            check="GPU",
            verdict="fail",
            found=facts.gpu_driver_missing,
            means="the device tier cannot be made",
            fix="apt-get install nvidia-driver    # its version must be that of the kernel module",
        )
    else:
        count = sum(node.removeprefix("/dev/nvidia").isdecimal() for node in facts.gpu_nodes)
        found = f"{count} seen" if count else "none seen"
        yield Finding(check="GPU", verdict="ok", found=found if wanted else f"{found}, none wanted")


def _compiled(config: Config, facts: Facts) -> Iterator[Finding]:
    again = "apt-get install gcc && pip install --force-reinstall --no-deps .    # in a checkout"
    for check, missing, means in (
        ("native", facts.native_missing, "hot loops run in Python, many times slower"),
        ("attention", facts.attention_missing, "attention on a CPU runs on torch, slower"),
    ):
        if missing:
            yield Finding(check=check, verdict="warn", found=missing, means=means, fix=again)
        else:
            yield Finding(check=check, verdict="ok", found="compiled")


def _systemd(config: Config, facts: Facts) -> Iterator[Finding]:
    if not facts.systemd:
        kept = "files in arena.dir keep the RAM tiers"
        yield Finding(check="systemd", verdict="ok", found=f"does not run here: {kept}")
    elif facts.systemd < SYSTEMD_KEEPS_DESCRIPTORS:
        yield Finding(
            check="systemd",
            verdict="warn",
            found=f"version {facts.systemd}",
            means="it cannot keep the memory of the RAM tiers over a restart",
            fix='arena.keep = "files"',
        )
    else:
        yield Finding(check="systemd", verdict="ok", found=f"version {facts.systemd}")


def _settings(config: Config, facts: Facts) -> Iterator[Finding]:
    if config.wal.durability == "none":
        yield Finding(
            check="durability",
            verdict="warn",
            found="none",
            means="what was acknowledged may be lost when the daemon dies",
            fix="tierkv serve --durability kill",
        )
    else:
        yield Finding(check="durability", verdict="ok", found=config.wal.durability)


def _clock(config: Config, facts: Facts) -> Iterator[Finding]:
    source = facts.clock_source
    if not source or source.startswith(GOOD_CLOCKS):
        yield Finding(check="clock", verdict="ok", found=source or "not told")
        return
    yield Finding(
        check="clock",
        verdict="warn",
        found=source,
        means="every look at the clock is a system call and a slow read",
        fix="echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
    )


CHECKS: tuple[Check, ...] = (
    _kernel,
    _memory,
    _arena,
    _huge_pages,
    _locked_memory,
    _open_files,
    _disk,
    _sync,
    _io_uring,
    _gpu,
    _compiled,
    _systemd,
    _settings,
    _clock,
)
