"""Sandboxes with a real systemd; a test that needs one is skipped where there can be none."""

from __future__ import annotations

import pytest

from tests.systemd.sandbox import why_not


@pytest.fixture(autouse=True, scope="session")
def _systemd() -> None:
    if reason := why_not():
        pytest.skip(reason)
