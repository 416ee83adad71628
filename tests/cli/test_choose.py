"""Which blocks a command is about, and where they go: what is refused before a daemon is asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]

CHOOSING = [
    ["delete", "--namespace", "0", "--yes"],
    ["pin"],
    ["unpin"],
    ["warm"],
    ["export", "warm.set"],
    ["ls", "chains"],
]


@pytest.mark.parametrize("option", ["--tenant", "--hash"])
@pytest.mark.parametrize("command", CHOOSING, ids=" ".join)
def test_an_unset_variable_chooses_nobody(tierkv: Run, command: list[str], option: str) -> None:
    code, out, err = tierkv(*command, option, "", "--socket", "/nobody")
    assert (code, out) == (2, "")
    assert f"Invalid value for '{option}': it is empty" in err


@pytest.mark.parametrize(
    "command",
    [
        ["ls", "--namespace", str(2**64)],
        ["ls", "blocks", "--after", str(2**64)],
        ["inspect", f"lease/{2**64}"],
    ],
    ids=" ".join,
)
def test_a_number_that_no_message_carries_is_refused(tierkv: Run, command: list[str]) -> None:
    code, out, err = tierkv(*command, "--socket", "/nobody")
    assert (code, out) == (2, "")
    assert "see `tierkv" in err


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_an_export_replaces_no_device_and_no_directory(
    tierkv: Run, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    there = tmp_path / "there"
    make(there)
    before = there.stat()
    code, out, err = tierkv("export", str(there), "--force", "--socket", "/nobody")
    assert (code, out) == (1, "")
    assert f"{there} is no regular file" in err
    assert os.path.samestat(there.stat(), before)
