"""Test support: the Prometheus of the distribution, and its promtool."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (the package prometheus)",
)

WAIT_S = 30.0
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run(
        ["promtool", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


class Prometheus:
    """One that runs. ``query`` asks for the value of an expression now."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._process = process

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API; fails with its own words if it refuses."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with LOCAL.open(url, timeout=WAIT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an expression, with their values."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def value(self, expression: str) -> float:
        """The only value of an expression; 0 for none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0

    def ready(self) -> bool:
        """Whether it answers."""
        assert self._process.poll() is None, "prometheus ended"
        try:
            with LOCAL.open(f"{self._url}/-/ready", timeout=WAIT_S):
                return True
        except OSError:  # not there yet, or not ready
            return False


@contextmanager
def prometheus(folder: Path, target_port: int, rules: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a port every second and evaluates the rules."""
    (folder / "rules.yml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": "tierkv", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = _free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        running = Prometheus(port, process)
        deadline = time.monotonic() + WAIT_S
        while not running.ready():
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield running
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
