"""What a part finds, written down line by line: what was found stays if the part dies later."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Finding = dict[str, Any]
"""``name``; and ``ok`` (a check), ``skipped`` or ``failed`` (why), or values, named with units."""


@dataclass
class Report:
    """Appends findings to a file of one JSON object a line, and shows them."""

    path: Path

    def add(self, name: str, **found: Any) -> None:
        """One finding."""
        finding = {"name": name, **found}
        with self.path.open("a") as file:
            file.write(json.dumps(finding) + "\n")
        print(shown(finding), flush=True)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Write down that this fails, if it does, and go on."""
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            self.add(name, failed=f"{type(error).__name__}: {error} ({place})")


def read(path: Path) -> list[Finding]:
    """All whole lines; the last may be torn."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"a torn line: {line!r}", file=sys.stderr)
    return found


def shown(finding: Finding) -> str:
    """For people: one line."""
    values = {key: value for key, value in finding.items() if key != "name"}
    mark = " "
    if "failed" in values or values.get("ok") is False:
        mark = "!"
    elif "skipped" in values:
        mark = "-"
    holds = values.pop("ok", None)
    told = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    if holds is not None:
        told = ", ".join(filter(None, ("holds" if holds else "does not hold", told)))
    return f"{mark} {finding['name']:<44} {told}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
