"""The shipped unit under a real systemd: what it keeps for the daemon, and when it lets go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.eight_prompts import ALL, NONE, PROMPTS, adopted, check, fill, found, write
from tests.crash.pattern import SMALL
from tests.systemd.sandbox import NO_TCP, RAM, Sandbox
from tierkv.errors import LeaseLost

SETTINGS = f"""{RAM}[disk]
bytes = "0"
{NO_TCP}"""
"""No disk: what a daemon finds, it finds in memory."""


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(SETTINGS) as sandbox:
        yield sandbox


def test_systemd_keeps_the_ram_tiers_over_kills_and_restarts_until_a_stop(
    sandbox: Sandbox,
) -> None:
    assert sandbox.show("NFileDescriptorStore") == "4"
    with sandbox.connect() as client:
        fill(client)
        namespace = client.namespace(SMALL)
        sequence = namespace.begin(PROMPTS[0])
        steps = [sandbox.kill_daemon, sandbox.kill_daemon, sandbox.restart]
        for generation, go_on in enumerate(steps, 1):
            tokens = [*PROMPTS[0], *range(13 * generation)]
            write(namespace, sequence, tokens)
            go_on()
            assert adopted(client) == ["device", "host"]
            assert sandbox.show("NFileDescriptorStore") == "4"
            assert sequence.tokens.tolist() == tokens
            sequence.reserve(0)
            check(namespace, sequence)
            assert found(client) == ALL
        sandbox.run("systemctl", "stop", "tierkv")
        sandbox.run("systemctl", "start", "tierkv")
        assert adopted(client) == []
        with pytest.raises(LeaseLost):
            sequence.reserve(1)
        assert found(client) == NONE
    assert sandbox.run("ls", "/dev/shm") == ""
