"""Rules for the tests that run real engines."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Before an engine is imported: each reads these only once.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the test's own process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)

from examples.demo_daemon import DemoDaemon  # noqa: E402 - after what its imports read
from tests.engines.model import smollm2_folder  # noqa: E402 - likewise

GIB = 1 << 30


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test is a failed one: whoever runs these tests wants to know that engines work."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing here may be: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So is a skipped module."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing here may be: {report.longrepr}"
    return report


@pytest.fixture
def daemon() -> Iterator[DemoDaemon]:
    """A running daemon of the test's own: 1 GiB device, 256 MiB host and 1 GiB disk tier."""
    with DemoDaemon(GIB, GIB // 4, GIB) as running:
        running.start()
        yield running


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real model, SmolLM2-135M-Instruct in float32."""
    return smollm2_folder()
