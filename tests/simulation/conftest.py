"""Rules for tests that let daemons die within this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_dead_is_left() -> Iterator[None]:
    """The frames of dead daemons end here: not at any later moment, in the midst of others' code.

    (CPython 3.11 takes it amiss if they end while it compiles.)
    """
    yield
    gc.collect()
