"""The examples for vLLM run as they are, with a daemon of their own and with one that is there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from examples.demo_daemon import DemoDaemon

ROOT = Path(__file__).resolve().parents[3]


def environment(**more: str) -> dict[str, str]:
    """A user's, whose own daemon is not to be found."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "wal", "kernels"))
    own = {"PYTHONPATH": path, "TIERKV_SOCKET": "/nowhere/tierkv.sock"}
    return {**os.environ, **own, **more}


def offline(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "examples.vllm_offline"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "both passes give the same tokens: yes" in done.stdout
    return done.stdout


def cached(text: str) -> list[tuple[int, int]]:
    """(cached, of how many) tokens of each request that the text tells of."""
    found = re.findall(r"(\d+) of (\d+) tokens (?:were )?cached", text)
    return [(int(hit), int(total)) for hit, total in found]


def test_offline_hits_what_the_daemon_has(daemon: DemoDaemon) -> None:
    out = offline(environment(TIERKV_SOCKET=daemon.socket))
    assert "no daemon was running" not in out
    requests = cached(out)
    assert len(requests) == 6
    assert requests[0][0] == 0
    assert all(total - hit <= 32 for hit, total in requests[3:])


def test_offline_starts_a_daemon_if_there_is_none() -> None:
    assert "no daemon was running" in offline(environment())


def test_serve_hits_after_kill_9_of_the_server_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = environment(PORT=str(port), PYTHON=sys.executable, TMPDIR=str(tmp_path))
    done = subprocess.run(
        [str(ROOT / "examples" / "vllm_serve.sh")],
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (cold, total), (warm, same_total) = cached(done.stdout)
    assert (cold, total) == (0, same_total)
    assert total - warm <= 32
    assert list(tmp_path.glob("tierkv-serve-*")) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server was left running"
