"""A driver over the stand-in, which every test must leave as empty as it found it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from tierkv_kernels.cuda.driver import Context, Driver


@pytest.fixture
def driver(standin_driver: Path) -> Iterator[Driver]:
    yield Driver(str(standin_driver))
    assert ctypes.CDLL(str(standin_driver)).standin_live_objects() == 0


@pytest.fixture
def context(driver: Driver) -> Iterator[Context]:
    """Current in the test's thread."""
    context = driver.device(0).context()
    with context:
        yield context
    context.close()
