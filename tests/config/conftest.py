"""A machine to resolve configurations on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tierkv.config.resolve import Environment, Space
from tierkv.units import GiB

MakeEnvironment = Callable[..., Environment]

RAM = Space(128 * GiB, 100 * GiB, 0)
DISK = Space(1000 * GiB, 1000 * GiB, 0)


@pytest.fixture
def make_environment() -> MakeEnvironment:
    """Builds an environment; without arguments: root, 100 GiB of RAM and 1000 GiB of disk free."""

    def make(
        *,
        uid: int = 0,
        variables: dict[str, str] | None = None,
        ram: Space = RAM,
        ram_free_bytes: int = 100 * GiB,
        disk: Space = DISK,
    ) -> Environment:
        return Environment(
            uid=uid,
            variables=variables or {},
            working_dir="/here",
            ram_free_bytes=ram_free_bytes,
            space=lambda path: ram if path.startswith("/dev/shm") else disk,
        )

    return make
