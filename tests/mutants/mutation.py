"""Breaks one rule of the protocol while a module is imported, and only in this process."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


class Unfit(Exception):
    """The source is not what an edit expects."""


@dataclass(frozen=True)
class Edit:
    """One change to a module's source. ``old`` must be there exactly once."""

    module: str
    old: str
    new: str


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source with some edits; never from or to a cache."""

    def __init__(self, name: str, path: str, edits: Sequence[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> object:  # type: ignore[override]  # it is a code object
        source = Path(self.path).read_text()
        for edit in self._edits:
            source = apply(edit, source)
        return compile(source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        edits = [edit for edit in self._edits if edit.module == fullname]
        if not edits:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            return None
        loader = _Loader(fullname, found.origin, edits)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


def apply(edit: Edit, source: str) -> str:
    """The source with the edit. Raises Unfit if it does not fit any more."""
    if source.count(edit.old) != 1:
        raise Unfit(f"{edit.module} holds {source.count(edit.old)} times, not once:\n{edit.old}")
    return source.replace(edit.old, edit.new)


def install(edits: Sequence[Edit]) -> None:
    """Break the modules that are imported from now on."""
    already = [edit.module for edit in edits if edit.module in sys.modules]
    if already:
        raise Unfit(f"imported before it could be broken: {already}")
    sys.meta_path.insert(0, _Finder(edits))
