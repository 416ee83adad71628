"""The command ``tierkv``: finds the sub-command, imports only that one, and reports errors.

Nothing heavier than click is imported here: ``tierkv --help`` and shell completion stay instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from tierkv import __version__
from tierkv.cli.exit_codes import Exit, exit_for
from tierkv.errors import InvariantViolation, TierkvError


class _Command(NamedTuple):
    module: str
    summary: str
    function: str = ""
    """If its name is not the command's."""


COMMANDS = {
    "serve": _Command("tierkv.cli.serve", "Run the daemon in the foreground."),
    "status": _Command("tierkv.cli.status", "Show what a running daemon holds and does."),
    "top": _Command("tierkv.cli.top", "Watch tiers, tenants and workers live."),
    "stat": _Command("tierkv.cli.stat", "Print one line of rates every second."),
    "doctor": _Command("tierkv.cli.doctor", "Check whether this machine is fit for the daemon."),
    "reload": _Command("tierkv.cli.reload", "Have a running daemon read its configuration anew."),
    "drain": _Command("tierkv.cli.drain", "Let a running daemon take no new workers."),
    "unit": _Command("tierkv.cli.unit", "Show or install the systemd units."),
    "ls": _Command(
        "tierkv.cli.ls", "List namespaces, tenants, prompts, blocks and who holds them."
    ),
    "inspect": _Command("tierkv.cli.inspect", "Show all about one block, sequence or lease."),
    "pin": _Command("tierkv.cli.pin", "Keep cached prompts for good."),
    "unpin": _Command("tierkv.cli.pin", "Let pinned prompts be dropped again."),
    "delete": _Command("tierkv.cli.delete", "Delete cached prompts, for good."),
    "warm": _Command("tierkv.cli.warm", "Bring cached prompts up from disk into memory."),
    "export": _Command("tierkv.cli.export", "Write cached prompts to a file."),
    "import": _Command("tierkv.cli.import_", "Cache the prompts of such a file.", "import_"),
    "config": _Command("tierkv.cli.config", "Show, check or print the configuration."),
    "verify": _Command("tierkv.cli.verify", "Check the log, the index and the blocks on disk."),
    "wal": _Command("tierkv.cli.wal", "Dump, measure, check and repair the log."),
    "dashboard": _Command(
        "tierkv.cli.dashboard", "Print the dashboard for Grafana and alerts for Prometheus."
    ),
    "kernels": _Command("tierkv.cli.kernels", "Show and compile what attention runs on."),
    "torture": _Command("tierkv.cli.torture", "Kill a daemon under load; count what survives."),
    "bench": _Command("tierkv.cli.bench", "Measure speed against what the machine can do."),
    "demo": _Command("tierkv.cli.demo", "Generate text with a small model on a tierkv cache."),
    "completion": _Command("tierkv.cli.completion", "Print what completes commands in a shell."),
}
"""Each module has a click command named like its key; the summary is here to spare the import."""


class LazyGroup(click.Group):
    """Lists all commands without importing one, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        known = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(known.module), known.function or cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without the import of every command, which click would do to see which are hidden."""
        return [
            CompletionItem(name, help=command.summary)
            for name, command in COMMANDS.items()
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="tierkv")
@click.pass_context
def cli(ctx: click.Context) -> int:
    """Keep the KV cache of language models in RAM and on NVMe, crash-safe.

    \b
    tierkv demo       see it at work
    tierkv doctor     is this machine fit for it?
    tierkv serve      run the daemon with automatic sizes
    tierkv status     how full, why evicted, who uses most, is it safe, what went wrong
    tierkv top        tiers, tenants and workers live
    tierkv ls chains  which prompts are cached, and whose
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        return Exit.USAGE
    return Exit.OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; errors become one line on standard error.

    Programming errors (InvariantViolation and whatever is not foreseen) keep their traceback.
    """
    try:
        result = cli.main(arguments, prog_name="tierkv", standalone_mode=False)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "tierkv"
        what = error.format_message().rstrip(".")
        return _report(f"{what}; see `{command} --help`", Exit.USAGE)
    except click.ClickException as error:
        return _report(error.format_message(), Exit.FAILED)
    except (click.Abort, KeyboardInterrupt):
        return _report("interrupted", Exit.FAILED)
    except InvariantViolation:
        raise
    except TierkvError as error:
        return _report(error.message, exit_for(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _report(f"{error.strerror or error}{where}", Exit.FAILED)
    return int(result or Exit.OK)


def _report(text: str, code: Exit) -> int:
    click.echo(f"tierkv: {text}", file=sys.stderr)
    return code
