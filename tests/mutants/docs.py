"""The list of mutants in docs/DURABILITY.md: ``python -m tests.mutants.docs`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.catalog import CONTROLS, MUTANTS, Mutant, Simulated

PAGE = Path(__file__).parents[2] / "docs" / "DURABILITY.md"
HEADING = "## 7. Every mutant\n"


def table() -> str:
    """The section's text."""
    rows = [f"| {one.name} | {_hunter(one)} |" for one in MUTANTS]
    controls = [f"- {one.name}" for one in CONTROLS]
    return "\n".join(
        [
            HEADING,
            "(made by `python -m tests.mutants.docs` from `tests/mutants/catalog.py`)",
            "",
            "| broken rule | noticed by |",
            "| --- | --- |",
            *rows,
            "",
            "Controls, in which nobody may notice anything:",
            "",
            *controls,
            "",
        ]
    )


def _hunter(mutant: Mutant) -> str:
    where = mutant.caught_by
    if isinstance(where, Simulated):
        faults = "".join(f", {kind} of {call}" for kind, call, _ in where.faults)
        return f"simulation: mode `{where.durability}`, ended by {where.dies_by}{faults}"
    return ", ".join(f"`{name}`" for name in where.names)


def main() -> None:
    """Write the section into the page."""
    before, _, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(before + table())


if __name__ == "__main__":
    main()
