"""How much room the file systems have that the daemon writes to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tierkv.config.schema import Config
from tierkv.obs.status import RoomStatus


class Room:
    """The free space of some directories, as it was when somebody looked last."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = directories
        self.status: dict[str, RoomStatus] = {}
        """By what the directory is for; one that cannot be looked at is not there."""

    @classmethod
    def of(cls, config: Config) -> Room:
        """The directories of a configuration: "state", and "disk" if there is a disk tier."""
        directories = {"state": Path(config.server.state_dir)}
        if config.disk.bytes:
            directories["disk"] = Path(config.disk.dir)
        return cls(directories)

    def look(self) -> None:
        """Look again. Mutates. On a thread: a file system that hangs must not stop the loop."""
        found = {}
        for name, directory in self._directories.items():
            try:
                file_system = os.statvfs(directory)
            except OSError:
                continue  # whoever wants to write there will say so
            found[name] = RoomStatus(
                path=str(directory),
                free_bytes=file_system.f_bavail * file_system.f_frsize,
                capacity_bytes=file_system.f_blocks * file_system.f_frsize,
            )
        self.status = found
