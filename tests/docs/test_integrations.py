"""The page on engines says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.integrations.vllm.counters import COUNTERS, METRIC_PREFIX, Counted
from tierkv.integrations.vllm.settings import PREFIX, Settings

PAGE = (Path(__file__).parents[2] / "docs" / "INTEGRATIONS.md").read_text()


@pytest.mark.parametrize("counted", COUNTERS, ids=lambda counted: counted.name)
def test_every_counter_is_on_the_page(counted: Counted) -> None:
    """With its meaning."""
    assert f"| `{METRIC_PREFIX}{counted.name}_total` | {counted.help} |" in PAGE


def test_every_setting_is_on_the_page_with_its_default() -> None:
    """And no other."""
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{PREFIX}")]
    named = {row.split("`")[1].removeprefix(PREFIX): row.split("|")[2].strip() for row in rows}
    assert set(named) == set(Settings.__struct_fields__)
    for name, default in named.items():
        value = getattr(Settings(), name)
        if value != "":
            assert default == str(value).lower()
