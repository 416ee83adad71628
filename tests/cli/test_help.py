"""The help of every command: one sentence, then examples that would run."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tierkv.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and sub-command with its full name."""
    waiting: list[tuple[str, click.Command]] = [("tierkv", cli)]
    while waiting:
        name, command = waiting.pop()
        yield name, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                waiting.append((f"{name} {child}", found))


EVERY = dict(all_commands())


def paragraphs(command: click.Command) -> list[str]:
    return inspect.cleandoc(command.help or "").split("\n\n")


def examples(command: click.Command) -> list[str]:
    """The lines of the second paragraph, without what explains them at their end."""
    mark, *lines = paragraphs(command)[1].splitlines()
    assert mark == "\b", "examples come right after the first sentence, as they are written"
    return [re.split(r" {2,}", line)[0] for line in lines]


@pytest.mark.parametrize("name", EVERY)
def test_help_begins_with_one_sentence(name: str) -> None:
    sentence = " ".join(paragraphs(EVERY[name])[0].split())
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert ". " not in sentence
    assert len(sentence) <= 100


@pytest.mark.parametrize("name", ["tierkv", *(f"tierkv {name}" for name in COMMANDS)])
def test_two_examples_or_more_come_next(name: str) -> None:
    found = examples(EVERY[name])
    assert len(found) >= 2 or not isinstance(EVERY[name], click.Group)
    assert found
    assert all(re.search(rf"\b{name}\b", example) for example in found), found


@pytest.mark.parametrize("name", ["tierkv", *(f"tierkv {name}" for name in COMMANDS)])
def test_the_examples_are_commands_that_there_are(name: str) -> None:
    for example in examples(EVERY[name]):
        inner = re.search(r"\$\((tierkv .*?)\)", example)
        words = shlex.split(inner[1] if inner else re.split(r" [|>] ", example)[0])
        command: click.Command = cli
        rest = words[1:]
        while isinstance(command, click.Group):
            _, found, rest = command.resolve_command(click.Context(command), rest)
            assert found is not None, example
            command = found
        command.make_context(words[-1], rest).close()  # raises a usage error if it would be one


@pytest.mark.parametrize("name", EVERY)
def test_every_option_says_what_it_does(name: str) -> None:
    for parameter in EVERY[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"


QUICK = (
    *("status", "stat", "top", "config", "completion", "doctor", "drain", "reload", "unit"),
    *("ls", "inspect", "pin", "unpin", "delete", "warm", "verify", "wal"),
)
"""Commands that people wait for: none of them takes a library with it that it may not need."""

HEAVY = ("torch", "numpy", "lmdb", "prometheus_client", "rich", "asyncio", "uvloop", "ctypes")


@pytest.mark.parametrize("name", QUICK)
def test_quick_commands_import_nothing_heavy(name: str) -> None:
    code = (
        "import sys\n"
        "from tierkv.cli.main import main\n"
        f"main([{name!r}, '--help'])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["stat"],
        ["status", "--socket", "/none"],
        ["reload"],
        ["drain"],
        ["ls"],
        ["inspect", "namespace/1"],
        ["pin", "--tenant", "x"],
        ["delete", "--tenant", "x", "--yes"],
        ["warm"],
    ],
)
def test_asking_a_daemon_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "import tierkv.cli.ask\n"
        "from tierkv.cli.main import main\n"
        # Not the daemon that this machine may have.
        "tierkv.cli.ask.SYSTEM_SOCKET = '/none'\n"
        f"assert main({arguments!r}) == 3\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    nowhere = {"TIERKV_SERVER__SOCKET": "/none", "TIERKV_CONFIG": "/dev/null", "HOME": "/none"}
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, env=nowhere
    )
