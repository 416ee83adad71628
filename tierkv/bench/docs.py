"""The table "One run" of docs/BENCHMARKS.md, made from a result.

``python -m tierkv.bench.docs FILE`` run at the root of the repository writes it anew from the JSON
of ``tierkv bench all --json``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tierkv.bench.harness import Line
from tierkv.bench.report import Document, from_json, number, speed_text, verdict_text
from tierkv.core.docs import table

MARKDOWN_PATH = Path("docs/BENCHMARKS.md")
BEGIN = "<!-- made by python -m tierkv.bench.docs FILE -->"
END = "<!-- end of what tierkv.bench made -->"


def replaced(page: str, found: Document) -> str:
    """The page with this run in the place of the last one. Raises ValueError without marks."""
    return filled(page, BEGIN, END, f"{text(found)}\n")


def filled(page: str, begin: str, end: str, content: str) -> str:
    """The page with other content between two marks. Raises ValueError if one is missing."""
    before, has_begin, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"the page lacks {begin} or {end}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def text(found: Document) -> str:
    """What was measured where, and a row for each line."""
    machine = found.machine
    held = [one.holds for line in found.lines for one in line.bars]
    summary = (
        f"tierkv {found.tierkv}, {machine.cpus} CPUs ({machine.cpu}), {machine.system},\n"
        f"{machine.python}, {machine.event_loop}, {machine.loops} loops, {machine.file_system}.\n"
        f"Medians of {found.rounds} rounds. {sum(held)} of {len(held)} bars are reached."
    )
    head = (
        *("line", "value", "speed against each reference (lowest to highest round)"),
        *("bars", "foreign"),
    )
    return f"{summary}\n\n{table(head, [_row(line) for line in found.lines])}"


def _row(line: Line) -> tuple[str, ...]:
    against = "; ".join(
        f"**{speed_text(one.speed)}** {one.name} "
        f"({speed_text(one.speed_min)} to {speed_text(one.speed_max)})"
        for one in line.references
    )
    bars = "; ".join(
        verdict_text(one) if one.holds else verdict_text(one).replace("below", "**below**", 1)
        for one in line.bars
    )
    value = f"{number(line.value)} {line.unit}"
    return f"`{line.name}`", value, against, bars, f"{line.foreign_cores:.1f}"


if __name__ == "__main__":
    result = from_json(Path(sys.argv[1]).read_bytes())
    MARKDOWN_PATH.write_text(replaced(MARKDOWN_PATH.read_text(), result))
