"""The JSON of every reading command keeps its keys and their types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.service.json_shapes import FILE, collect, shape

PROMISED: dict[str, Any] = json.loads(FILE.read_text())


def missing(promised: Any, found: Any, path: str = "") -> list[str]:
    """What of a promise is not kept; an empty list or an empty text promises nothing."""
    if isinstance(promised, dict):
        if not isinstance(found, dict):
            return [f"{path} is no object"]
        lost = [f"{path}.{key} is gone" for key in promised.keys() - found.keys()]
        both = promised.keys() & found.keys()
        return lost + [
            fault for key in both for fault in missing(promised[key], found[key], f"{path}.{key}")
        ]
    if isinstance(promised, list):
        if not isinstance(found, list):
            return [f"{path} is no list"]
        return missing(promised[0], found[0], f"{path}[]") if promised and found else []
    return [] if promised == found else [f"{path} is {found}, not {promised}"]


@pytest.mark.timeout(120)
def test_every_command_keeps_its_promise() -> None:
    found = dict(collect())
    assert list(found) == list(PROMISED)
    assert {name: missing(PROMISED[name], found[name]) for name in found} == {
        name: [] for name in found
    }


@pytest.mark.parametrize(
    ("promised", "found", "faults"),
    [
        ({"a": 1}, {"a": 2, "b": 3}, []),
        ({"a": 1}, {}, [".a is gone"]),
        ({"a": 1}, {"a": "x"}, [".a is str, not number"]),
        ({"a": [{"b": True}]}, {"a": [{"b": 1}]}, [".a[].b is number, not bool"]),
        ({"a": [{"b": 1}]}, {"a": []}, []),
        ({"a": {}}, {"a": []}, [".a is no object"]),
        ({"a": []}, {"a": {}}, [".a is no list"]),
        ({"a": None}, {"a": 1}, [".a is number, not NoneType"]),
    ],
)
def test_what_counts_as_broken(promised: Any, found: Any, faults: list[str]) -> None:
    assert missing(shape(promised), shape(found)) == faults
