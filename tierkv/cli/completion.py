"""``tierkv completion``: what makes a shell complete tierkv's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the lines that make a shell complete tierkv's commands and options.

    \b
    eval "$(tierkv completion bash)"
    tierkv completion bash > /etc/bash_completion.d/tierkv
    tierkv completion zsh > "${fpath[1]}/_tierkv"
    tierkv completion fish > ~/.config/fish/completions/tierkv.fish
    """
    found = get_completion_class(shell)
    if found is None:  # pragma: no cover - the choice above has none but those that click knows
        raise click.ClickException(f"nothing is known of {shell}")
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "tierkv", "_TIERKV_COMPLETE").source())
