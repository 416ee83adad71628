"""The example of the README, run as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import tierkv
from tests.examples.paged_fake import FakeCache

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_the_second_time_all_full_blocks_are_cached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tierkv, "connect", FakeCache, raising=False)
    runpy.run_path(str(QUICKSTART))
    assert capsys.readouterr().out == (
        "first time: 0 of 100 tokens are cached\nsecond time: 96 of 100 tokens are cached\n"
    )
