"""A daemon that is told to log what is slow says where the time went, and remembers it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.service.blocks import BLOCK, SPEC, fill, press, sized, tokens
from tests.service.running import running, until


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
        assert problem["count"] >= 3
        assert problem["message"].startswith("slow request: ")
        assert problem["fields"]["worker"] == "worker-7"
