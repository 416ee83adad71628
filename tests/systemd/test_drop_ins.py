"""The shipped drop-ins: nothing that the daemon needs is missing in what they leave."""

from __future__ import annotations

from tests.crash.eight_prompts import ALL, adopted, fill, found
from tests.systemd.sandbox import DISK, RAM, Sandbox

SETTINGS = RAM + DISK


def test_without_network_and_devices() -> None:
    with Sandbox(SETTINGS, shipped=("cpu-only", "local-only")) as sandbox, sandbox.connect() as c:
        fill(c)
        sandbox.kill_daemon()
        assert adopted(c) == ["device", "host"]
        assert found(c) == ALL
        assert sandbox.get("/readyz") == (200, "serving\n")
        assert "metrics_port=0" in sandbox.log()
        assert "level=warning" not in sandbox.log()


def test_with_a_gpus_devices_and_with_memory_in_files_that_outlive_a_stop() -> None:
    with Sandbox(SETTINGS, shipped=("devices", "files")) as sandbox:
        assert sandbox.show("NFileDescriptorStore") == "0"
        with sandbox.connect() as client:
            fill(client)
        sandbox.systemctl("stop", "tierkv")
        sandbox.systemctl("start", "tierkv")
        with sandbox.connect() as client:
            assert adopted(client) == ["device", "host"]
            assert found(client) == ALL
