"""What a run leaves for programs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tierkv.bench.harness import Line
from tierkv.bench.report import Machine

VERSION = 1


class Crash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After kill -9 behind the last of ``blocks`` acknowledged: how many were ``found``, by trial.

    ``wrong``: how many of them had another content. ``first_hit_s``: from the restart to the first
    block, median; None if that was lost.
    """

    blocks: int
    found: list[int]
    wrong: int
    first_hit_s: float | None


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer: what it is and promises, and why it was not measured if it was not."""

    name: str
    what: str
    survives: str
    makes_room: bool
    server: bool
    version: str = ""
    not_run: str = ""
    crash: Crash | None = None


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run. A line's name begins with its peer's: ``redis.put.64k``."""

    version: int
    tierkv: str
    quick: bool
    rounds: int
    machine: Machine
    placement: str
    rows: list[Row]
    lines: list[Line]

    def line(self, peer: str, measure: str) -> Line | None:
        """What was measured of that peer, if it was."""
        name = f"{peer}.{measure}"
        return next((line for line in self.lines if line.name == name), None)


def save(found: Document, path: Path) -> None:
    """Write it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def load(path: Path) -> Document:
    """Read it back. Raises msgspec.ValidationError if it is no such document."""
    return msgspec.json.decode(path.read_bytes(), type=Document)
