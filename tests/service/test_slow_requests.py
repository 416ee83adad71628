"""A daemon that is told to log what is slow says where the time went, and remembers it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.blocks import BLOCK, SPEC, fill, press, sized, store, tokens
from tests.service.running import Daemon, running, until


def test_a_reload_turns_it_on_and_each_line_says_what_took_how_long(tmp_path: Path) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text('[log]\nslow_op_s = "1h"\n')
    settings = sized(8, 0, 64)
    with running(settings, extra={"TIERKV_CONFIG": str(file)}) as daemon:
        with daemon.connect("worker-7") as client:
            ns = client.namespace(SPEC)
            press(client, ns, 16, seed=900)
            client.flush()
            assert "slow request" not in daemon.said()
            file.write_text("[log]\nslow_op_s = 0\n")
            daemon.signal(signal.SIGHUP)
            until(lambda: "configuration reloaded" in daemon.said())
            with fill(ns, tokens(4, seed=900)) as sequence:
                assert sequence.cached_tokens == 4 * BLOCK
            client.flush()
        # A request is answered first, and then logged.
        until(lambda: "slow request: flush" in daemon.said())
        lines = re.findall(r'slow request: (\w+)" (.*)', daemon.said())
        said = {verb: dict(re.findall(r"(\w+)=(\S+)", fields)) for verb, fields in lines}
        acquired = said["acquire"]
        assert acquired["code"] == "ok"
        assert acquired["disk_to_device_blocks"] == "4"
        assert acquired["worker"] == "worker-7"
        assert {"lease", "pid", "request", "namespace", "sequence"} <= acquired.keys()
        phases = {name: float(value) for name, value in acquired.items() if name.endswith("_s")}
        took_s = phases.pop("took_s")
        assert {"queued_s", "plan_s", "settle_s", "disk_to_device_s", "log_s", "reply_s"} == set(
            phases
        )
        assert sum(phases.values()) == pytest.approx(took_s, abs=1e-5)
        assert {"write_behind_s", "checkpoint_s"} <= said["flush"].keys()
        (problem,) = [
            one for one in daemon.status()["problems"] if one["logger"] == "tierkv.obs.slow"
        ]
        assert problem["count"] >= 1
        assert problem["message"] != "slow request: flush"  # that takes the time that it takes
        assert problem["fields"]["worker"] == "worker-7"


@contextmanager
def slow_drive(daemon: Daemon) -> Iterator[None]:
    """Meanwhile each sync of the daemon takes more than a second."""
    command = ["strace", "-f", "-o", os.devnull, "-e", "trace=fdatasync"]
    command += ["-e", "inject=fdatasync:delay_enter=1100000", "-p", str(daemon.pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    assert "attached" in tracer.stderr.readline()
    yield
    tracer.terminate()
    tracer.communicate()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("strace") is None,
    reason="needs strace, and root to trace a process that is not its child",
)
def test_a_slow_drive_is_named_and_so_is_the_seal_that_waited_for_it() -> None:
    settings = sized(8, 0, 64, **{"wal.durability": "power", "wal.checkpoint_s": "1h"})
    with running(settings) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        with slow_drive(daemon):
            store(ns, tokens(2, seed=950))
            until(lambda: "slow request: seal" in daemon.said())
        syncs = re.findall(r'level=warning .* msg="slow sync of the log" (.*)', daemon.said())
        assert syncs
        assert all(re.fullmatch(r"took_s=1\.\d+ lsn=\d+", sync) for sync in syncs)
        (seal,) = re.findall(r'slow request: seal" (.*)', daemon.said())
        said = dict(re.findall(r"(\w+)=(\S+)", seal))
        assert float(said["device_to_disk_s"]) >= 1.0
        assert float(said["log_s"]) >= 1.0
        rest_s = float(said["took_s"]) - float(said["log_s"]) - float(said["device_to_disk_s"])
        assert rest_s < 1.5
