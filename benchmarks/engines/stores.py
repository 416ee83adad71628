"""What stands behind the engine: a store in a process of its own, and the connector to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from benchmarks.engines.engine import environment
from examples.demo_daemon import DemoDaemon

GIB = 1 << 30
RAM_BYTES = 5 * GIB // 2
DISK_BYTES = 6 * GIB
START_TIMEOUT_S = 120.0


class Store(ABC):
    """A store of the benchmark's own. A context manager: killed and removed at the end."""

    name: str
    settings: str

    @property
    @abstractmethod
    def transfer(self) -> dict[str, Any]:
        """vLLM's KVTransferConfig that connects an engine with it."""

    @abstractmethod
    def start(self) -> None:
        """Start it on what it kept, and return as soon as it serves."""

    @abstractmethod
    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""

    @abstractmethod
    def remove(self) -> None:
        """Remove what it kept."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.remove()


class Tierkv(Store):
    """A daemon with 2.5 GiB of RAM tiers, and a disk tier."""

    name = "tierkv"
    settings = "`device.bytes` = 2.25 GiB, `host.bytes` = 0.25 GiB, `disk.bytes` = 6 GiB"

    def __init__(self) -> None:
        host_bytes = GIB // 4
        self._daemon = DemoDaemon(RAM_BYTES - host_bytes, host_bytes, DISK_BYTES)

    @property
    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tierkv.socket": self._daemon.socket},
        }

    def start(self) -> None:
        self._daemon.start()

    def kill(self) -> None:
        self._daemon.kill()

    def remove(self) -> None:
        self._daemon.__exit__()


class Lmcache(Store):
    """Its multiprocess server with 2.5 GiB of RAM in shared memory, and files below it."""

    name = "LMCache"
    settings = "`--l1-size-gb 2.5 --no-l1-use-lazy`, engine-driven, shared memory, `fs` adapter"

    def __init__(self, python: Path, folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._files = folder / "lmcache"
        self._pool = Path("/dev/shm") / f"lmcache_l1_pool_{os.getpid()}"  # its prefix
        self._port, self._http, self._prometheus = free_ports(3)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
            },
        }

    def start(self) -> None:
        self._files.mkdir(parents=True, exist_ok=True)
        adapter = {"type": "fs", "base_path": str(self._files)}
        command = [
            *(str(self._python), str(self._python.parent / "lmcache"), "server"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-port", str(self._http), "--prometheus-port", str(self._prometheus)),
            *("--l1-size-gb", str(RAM_BYTES / GIB), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", "engine_driven", "--shm-name", self._pool.name),
            *("--l2-adapter", json.dumps(adapter)),
        ]
        with (self._folder / "lmcache.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"LMCache's server does not serve; see {self._folder}")
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._pool.unlink(missing_ok=True)  # it leaves it behind, and does not use it again

    def remove(self) -> None:
        shutil.rmtree(self._files, ignore_errors=True)

    def _is_healthy(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self._http}/healthcheck", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
