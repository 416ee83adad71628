"""What the JSON of every reading command consists of: ``python -m tests.service.json_shapes``.

That writes json_shapes.json anew, from a real daemon and the store that it leaves. Programs rely on
these keys: they may be added, never renamed, removed or given another type.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.service.blocks import SPEC, fill, press, sized, store, tokens
from tests.service.running import environment, running, until

FILE = Path(__file__).with_name("json_shapes.json")

ASKING = (
    "status",
    "stat 0.1 1",
    *(f"ls {kind}" for kind in ("namespaces", "tenants", "chains", "blocks", "sequences")),
    "ls leases",
    "inspect namespace/0",
    "reload",
)
"""Commands that ask the daemon."""

LOCAL = ("config show", "config check", "config default", "doctor")
OFFLINE = ("verify", "wal stat", "wal verify")
"""Commands that look at the store of a daemon that has ended."""


def shape(value: Any) -> Any:
    """Keys and types of a document; of a list those of its first element."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def collect() -> Iterator[tuple[str, Any]]:
    """Every command and the shape of what it prints."""
    with running(sized(16, 16, 64)) as daemon:
        with daemon.connect("worker") as client:
            ns = client.namespace(SPEC)
            store(ns, tokens(8, seed=1))
            press(client, ns, 48, seed=10)
            with fill(ns, tokens(8, seed=1)):
                for command in ASKING:
                    yield command, _shape_of(command, ["--socket", str(daemon.socket)])
        for command in LOCAL:
            options = [] if command == "config default" else daemon.flags
            yield command, _shape_of(command, options)
        until(lambda: daemon.status()["behind_blocks"] == 0)
        assert daemon.stop() == 0
        for command in OFFLINE:
            yield command, _shape_of(command, daemon.flags)


def _shape_of(command: str, options: list[str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", *command.split(), "--json", *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # 1: the doctor may find something wrong with this machine.
    assert done.returncode == 0 or command == "doctor", (command, done.stderr)
    return shape(json.loads(done.stdout))


def main() -> None:
    """Write the file."""
    FILE.write_text(json.dumps(dict(collect()), indent=1) + "\n")


if __name__ == "__main__":
    main()
