"""Where a torture, or a benchmark, takes place: away from every store and its settings."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.units import MiB, format_bytes

NEEDED_BYTES = 256 * MiB
"""Room that a torture's store, its log and its index never pass."""


def beside(state_dir: Path) -> Path:
    """A directory that exists on the file system of a state directory, which need not exist."""
    place = state_dir.parent
    while not place.exists():
        place = place.parent
    if state_dir.exists() and state_dir.stat().st_dev != place.stat().st_dev:
        return state_dir
    return place


def new_folder(parent: Path, purpose: str = "torture", needed_bytes: int = NEEDED_BYTES) -> Path:
    """Make an empty folder in ``parent``, which is made if it is not there.

    Raises ConfigError if that cannot be done or has too little room.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < needed_bytes:
            raise ConfigError(
                f"{parent} has {format_bytes(free_bytes)} left, and {format_bytes(needed_bytes)} "
                "are needed; name another directory by --dir"
            )
        return Path(tempfile.mkdtemp(prefix=f"tierkv-{purpose}-", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder in {parent}: {error.strerror}; name another directory by --dir"
        ) from error


def without_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a daemon sees neither settings nor a service manager."""
    kept = {
        name: value
        for name, value in variables.items()
        if not name.startswith("TIERKV_") and name != "NOTIFY_SOCKET"
    }
    return kept | {"TIERKV_CONFIG": os.devnull}
