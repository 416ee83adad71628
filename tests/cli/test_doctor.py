"""``tierkv doctor``: each judgement from made-up facts, and one look at this very machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tierkv.config.load import load
from tierkv.config.resolve import Environment, Space
from tierkv.config.schema import Config
from tierkv.service.doctor import gather
from tierkv.service.doctor.examine import CHECKS, Diagnosis, Finding, examine
from tierkv.service.doctor.facts import UNLIMITED, Facts, FileSystem
from tierkv.units import GiB, MiB

Run = Callable[..., tuple[int, str, str]]


def place(path: str, kind: str = "ext4", **more: Any) -> FileSystem:
    sizes = {"free_bytes": 100 * GiB, "capacity_bytes": 200 * GiB}
    return FileSystem(path=path, kind=kind, **(sizes | more))


FACTS = Facts(
    kernel=(6, 1),
    ram_free_bytes=64 * GiB,
    locked_bytes_max=UNLIMITED,
    open_files_max=65_536,
    shmem_huge="advise",
    state=place("/state"),
    disk=place("/state/data"),
    arena=place("/dev/shm/t", "tmpfs", mount="/dev/shm", options=("rw", "huge=advise")),
    sync_s=(0.001,) * 50,
    io_uring_missing="",
    gpu_nodes={},
    gpu_driver_missing="no libcuda.so.1",
    native_missing="",
    attention_missing="",
    systemd=252,
    clock_source="tsc",
)
"""A machine without a fault."""

SIZES = {"device.bytes": "8GiB", "host.bytes": "4GiB", "disk.bytes": "64GiB"}


def config(**settings: str) -> Config:
    flags = SIZES | {key.replace("__", "."): value for key, value in settings.items()}
    plenty = 1 << 50
    nowhere = Environment(0, {}, "/", plenty, lambda _path: Space(plenty, plenty, 0))
    return load(None, nowhere, flags).config


def found(check: str, facts: Facts = FACTS, **settings: str) -> Finding:
    """What the doctor says of one thing."""
    (finding,) = [one for one in examine(config(**settings), facts).findings if one.check == check]
    return finding


def test_a_machine_without_a_fault() -> None:
    diagnosis = examine(config(), FACTS)
    assert diagnosis.verdict == "ok"
    assert len(diagnosis.findings) >= len(CHECKS)
    assert all(one.found and not one.fix and not one.means for one in diagnosis.findings)


FAULTS: list[tuple[str, str, dict[str, Any], dict[str, str], str]] = [
    ("kernel", "warn", {"kernel": (5, 10)}, {}, "install Linux 5.14"),
    ("open files", "warn", {"open_files_max": 1024}, {}, "ulimit -n 2304"),
    (
        "locked memory",
        "warn",
        {"locked_bytes_max": 8 * MiB, "gpu_nodes": {"/dev/nvidia0": True}},
        {"device__kind": "cuda"},
        "ulimit -l unlimited",
    ),
    ("memory", "fail", {"ram_free_bytes": 4 * GiB}, {}, "tierkv serve --device-bytes 1638MiB"),
    (
        "huge pages",
        "warn",
        {"arena": place("/dev/shm/t", "tmpfs", mount="/dev/shm", options=("rw",))},
        {},
        "mount -o remount,huge=advise /dev/shm",
    ),
    (
        "huge pages",
        "warn",
        {"shmem_huge": "never"},
        {"arena__keep": "manager"},
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    ),
    ("arena", "warn", {"arena": place("/a")}, {}, "TIERKV_ARENA__DIR=/dev/shm/tierkv"),
    (
        "arena",
        "fail",
        {
            "arena": place(
                "/dev/shm/t", "tmpfs", mount="/dev/shm", free_bytes=GiB, capacity_bytes=3 * GiB
            )
        },
        {},
        "mount -o remount,size=14G /dev/shm",
    ),
    ("state", "fail", {"state": place("/state", problem="/ is not writable")}, {}, "install -d"),
    ("disk", "warn", {"disk": place("/state/data", "tmpfs")}, {}, "disk.dir = "),
    ("disk", "warn", {"disk": place("/state/data", "nfs4")}, {}, "disk.dir = "),
    (
        "disk room",
        "fail",
        {"disk": place("/state/data", free_bytes=GiB)},
        {},
        "tierkv serve --disk-bytes 512MiB",
    ),
    ("direct I/O", "warn", {"disk": place("/state/data", direct_io=False)}, {}, "disk.dir = "),
    (
        "disk sync",
        "warn",
        {"sync_s": (0.03,) * 50},
        {"wal__durability": "power"},
        "tierkv serve --durability kill",
    ),
    ("io_uring", "warn", {"io_uring_missing": "Operation not permitted"}, {}, "sysctl -w"),
    (
        "io_uring",
        "fail",
        {"io_uring_missing": "Operation not permitted"},
        {"disk__io": "uring"},
        "sysctl -w kernel.io_uring_disabled=0",
    ),
    ("GPU", "fail", {}, {"device__kind": "cuda"}, "nvidia-smi"),
    (
        "GPU",
        "fail",
        {"gpu_nodes": {"/dev/nvidia0": False, "/dev/nvidiactl": True}},
        {"device__kind": "cuda"},
        "chmod 0666 /dev/nvidia0",
    ),
    (
        "GPU",
        "fail",
        {"gpu_nodes": {"/dev/nvidia0": True}},
        {"device__kind": "cuda"},
        "apt-get install nvidia-driver",
    ),
    ("native", "warn", {"native_missing": "no compiler"}, {}, "apt-get install gcc"),
    ("attention", "warn", {"attention_missing": "not compiled"}, {}, "apt-get install gcc"),
    ("systemd", "warn", {"systemd": 219}, {}, 'arena.keep = "files"'),
    ("durability", "warn", {}, {"wal__durability": "none"}, "tierkv serve --durability kill"),
    ("clock", "warn", {"clock_source": "hpet"}, {}, "echo tsc > "),
]


@pytest.mark.parametrize(("check", "verdict", "facts", "settings", "fix"), FAULTS)
def test_a_fault_is_named_with_what_it_means_and_the_line_that_fixes_it(
    check: str, verdict: str, facts: dict[str, Any], settings: dict[str, str], fix: str
) -> None:
    finding = found(check, replace(FACTS, **facts), **settings)
    assert finding.verdict == verdict
    assert finding.found
    assert finding.means
    assert finding.fix.startswith(fix)
    assert shlex.split(finding.fix, comments=True)


@pytest.mark.parametrize(
    ("check", "facts", "settings"),
    [
        ("locked memory", {"locked_bytes_max": 8 * MiB}, {}),
        ("io_uring", {"io_uring_missing": "Operation not permitted"}, {"disk__io": "threads"}),
        ("disk sync", {"sync_s": (0.03,) * 50}, {}),
        ("GPU", {"gpu_nodes": {"/dev/nvidia0": False}}, {}),
        ("systemd", {"systemd": 0}, {}),
        ("clock", {"clock_source": ""}, {}),
        ("disk", {"disk": place("/", problem="/ is not writable")}, {"disk__bytes": "0"}),
        ("open files", {"open_files_max": UNLIMITED}, {}),
    ],
)
def test_what_does_not_matter_here_is_no_fault(
    check: str, facts: dict[str, Any], settings: dict[str, str]
) -> None:
    assert found(check, replace(FACTS, **facts), **settings).verdict == "ok"


def test_what_the_tiers_hold_already_counts_as_room() -> None:
    holds = place("/state/data", free_bytes=GiB, own_bytes=64 * GiB)
    assert found("disk room", replace(FACTS, disk=holds)).verdict == "ok"


def test_the_worst_finding_decides() -> None:
    facts = replace(FACTS, kernel=(5, 10))
    assert examine(config(), facts).verdict == "warn"
    assert examine(config(), replace(facts, ram_free_bytes=1)).verdict == "fail"


# --- this machine ---------------------------------------------------------------------------------

SMALL = ("--set", "device.bytes=4MiB", "--set", "host.bytes=0", "--set", "disk.bytes=16MiB")


def test_a_look_at_this_machine(tierkv: Run, tmp_path: Path) -> None:
    where = ("--set", f"server.state_dir={tmp_path}", "--set", f"arena.dir={tmp_path / 'arena'}")
    code, out, err = tierkv("doctor", "--json", *SMALL, *where)
    assert err == ""
    diagnosis = msgspec.json.decode(out, type=Diagnosis)
    assert code == (1 if diagnosis.verdict == "fail" else 0)
    by_check = {one.check: one for one in diagnosis.findings}
    assert by_check["disk sync"].found.startswith("fdatasync p50 ")
    assert str(tmp_path) in by_check["state"].found
    assert by_check["state room"].verdict == by_check["memory"].verdict == "ok"
    assert list(tmp_path.iterdir()) == [tmp_path / "empty.toml"]
    code, text, _ = tierkv("doctor", *SMALL, *where)
    for one in diagnosis.findings:
        assert one.check in text
    _, lines, _ = tierkv("doctor", "--fix-lines", *SMALL, *where)
    fixes = [one.fix for one in diagnosis.findings if one.fix]
    assert lines.splitlines() == list(dict.fromkeys(fixes))


def test_what_will_not_work_is_exit_1(
    tierkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--set", f"server.state_dir={tmp_path}", *SMALL)
    monkeypatch.setattr(gather, "gather", lambda _config: replace(FACTS, ram_free_bytes=1))
    code, out, _ = tierkv("doctor", *where)
    assert code == 1
    assert "\nfail: memory: 4.00 MiB for the RAM tiers, 1 B free\n" in out
    assert out.endswith("Something will not work: see above.\n")
    assert json.loads(tierkv("doctor", "--json", *where)[1])["verdict"] == "fail"


def test_a_bad_configuration_is_said_first(tierkv: Run) -> None:
    code, out, err = tierkv("doctor", "--set", "disk.bites=1")
    assert (code, out) == (78, "")
    assert "did you mean disk.bytes?" in err
