"""The command itself: start-up, help, exit statuses and error lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest

from tierkv import __version__
from tierkv.cli import main as main_module
from tierkv.cli.exit_codes import Exit, exit_for
from tierkv.errors import (
    ConfigError,
    CorruptionError,
    InvariantViolation,
    NotReady,
    TierkvError,
    Unavailable,
    VersionMismatch,
)

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "lmdb", "prometheus_client", "msgspec", "rich", "asyncio", "xxhash")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Adds a command ``fail`` that raises."""

    def install(error: BaseException) -> None:
        @click.command()
        def fail() -> None:
            raise error

        module = ModuleType("failing_command")
        module.fail = fail  # type: ignore[attr-defined]  # a module made for this test
        monkeypatch.setitem(sys.modules, "failing_command", module)
        command = main_module._Command("failing_command", "Fail.")
        monkeypatch.setitem(main_module.COMMANDS, "fail", command)

    return install


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument: str) -> None:
    code = (
        "import sys\n"
        "from tierkv.cli.main import main\n"
        f"code = main([{argument!r}])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_reading_commands_do_without_the_daemons_libraries() -> None:
    code = (
        "import sys, tierkv.cli.status, tierkv.cli.config, tierkv.cli.serve, tierkv.cli.bench\n"
        "heavy = [name for name in ('torch', 'numpy', 'lmdb', 'prometheus_client', 'rich')\n"
        "         if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "tierkv", "--version"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"tierkv, version {__version__}\n"


def test_help_lists_every_command(tierkv: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = tierkv("--help")
    assert code == Exit.OK
    for name, command in main_module.COMMANDS.items():
        assert f"  {name}" in out
        assert command.summary in out


def test_without_a_command_help_is_shown(tierkv: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = tierkv()
    assert code == Exit.USAGE
    assert out.startswith("Usage: tierkv")


@pytest.mark.parametrize("name", [*main_module.COMMANDS])
def test_every_command_has_its_name_and_help(
    name: str, tierkv: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = tierkv(name, "--help")
    assert code == Exit.OK
    assert out.startswith(f"Usage: tierkv {name} ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["statu"], "tierkv: No such command 'statu'; see `tierkv --help`\n"),
        (["status", "--josn"], "`tierkv status --help`\n"),
        (["config"], "tierkv: Missing command; see `tierkv config --help`\n"),
        (["wal"], "tierkv: Missing command; see `tierkv wal --help`\n"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], line: str, tierkv: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = tierkv(*arguments)
    assert (code, out) == (Exit.USAGE, "")
    assert err.endswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("x: bad (f:1); fix it"), 78, "tierkv: x: bad (f:1); fix it\n"),
        (Unavailable("gone"), 3, "tierkv: gone\n"),
        (NotReady("recovering"), 75, "tierkv: recovering\n"),
        (CorruptionError("damaged"), 4, "tierkv: damaged\n"),
        (TierkvError("other"), 1, "tierkv: other\n"),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "tierkv: Permission denied (/x)\n",
        ),
        (click.ClickException("no"), 1, "tierkv: no\n"),
        (KeyboardInterrupt(), 1, "tierkv: interrupted\n"),
    ],
)
def test_errors_end_in_a_line_and_a_status(
    error: BaseException,
    code: int,
    line: str,
    failing: Callable[[BaseException], None],
    tierkv: Callable[..., tuple[int, str, str]],
) -> None:
    failing(error)
    found = tierkv("fail")
    assert (found[0], found[2].lstrip("\n")) == (code, line)


@pytest.mark.parametrize("error", [InvariantViolation("impossible"), ZeroDivisionError()])
def test_programming_errors_keep_their_traceback(
    error: BaseException,
    failing: Callable[[BaseException], None],
    tierkv: Callable[..., tuple[int, str, str]],
) -> None:
    failing(error)
    with pytest.raises(type(error)):
        tierkv("fail")


def test_subclasses_of_an_error_share_its_status() -> None:
    assert exit_for(VersionMismatch("old")) == Exit.FAILED
    assert {code.value for code in Exit} == {0, 1, 2, 3, 4, 5, 75, 78}
