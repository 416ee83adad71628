"""The files of the service: which there are, how they are made to fit, and where they go."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tierkv
from tierkv.config.docs import default_toml
from tierkv.errors import InvalidArgument, TierkvError

SERVICE = "tierkv.service"
UNITS = (SERVICE, "tierkv.socket", "tierkv-metrics.socket")
DROP_INS = ("local-only", "cpu-only", "devices", "files")
USERS = "tierkv.conf"
NAMES = (*UNITS, *(f"{name}.conf" for name in DROP_INS), USERS)

_COMMAND = "/usr/bin/tierkv"
"""The command as the shipped files name it."""

_SYSTEM_ONLY = "# --- from here on"
_INSTALL = "\n[Install]"
_HIDDEN = ("/home", "/root", "/run/user")
"""What ProtectHome= hides from a service of the system's manager (systemd.exec(5))."""


class Installed(NamedTuple):
    """A file and what belongs into it. ``keep``: whatever is there already stays."""

    path: Path
    text: str
    keep: bool = False


def shipped(name: str) -> str:
    """A file as it is shipped. Raises InvalidArgument for one that there is not."""
    if name not in NAMES:
        raise InvalidArgument(f"there is no {name!r}; there are {', '.join(NAMES)}")
    folder = "units" if name in UNITS else "sysusers.d" if name == USERS else "dropins"
    return (_home() / folder / name).read_text(encoding="utf-8")


def fitted(name: str, command: str, *, user: bool) -> str:
    """A file that runs this command; with ``user`` for a user's own manager."""
    text = shipped(name).replace(_COMMAND, command)
    return _for_user(text) if user else text


def files(command: str, drop_ins: tuple[str, ...], root: Path, *, config: Path) -> list[Installed]:
    """What an installation for the system's manager consists of, below ``root``."""
    units = root / "etc/systemd/system"
    found = [*_units(command, drop_ins, units, user=False)]
    found.append(Installed(root / "etc/sysusers.d/tierkv.conf", shipped(USERS)))
    found.append(Installed(root / config.relative_to("/"), default_toml(), keep=True))
    return found


def user_files(command: str, root: Path, config_home: Path) -> list[Installed]:
    """The same for a user's own manager: no sandbox, no user of its own."""
    home = root / config_home.relative_to("/")
    found = [*_units(command, (), home / "systemd/user", user=True)]
    found.append(Installed(home / "tierkv/tierkv.toml", default_toml(), keep=True))
    return found


def this_command() -> str:
    """How to run this very tierkv."""
    script = Path(sys.prefix) / "bin" / "tierkv"
    return str(script) if script.exists() else f"{sys.executable} -P -m tierkv"


def hidden_by_the_sandbox() -> Path | None:
    """A part of this tierkv that a service of the system's manager could not see; None if none."""
    parts = (
        sys.executable,
        Path(sys.executable).resolve(),
        sys.prefix,
        sys.base_prefix,
        _package(),
    )
    paths = [Path(part) for part in parts]
    return next((path for path in paths if any(map(path.is_relative_to, _HIDDEN))), None)


def _units(
    command: str, drop_ins: tuple[str, ...], folder: Path, *, user: bool
) -> Iterator[Installed]:
    for name in UNITS:
        yield Installed(folder / name, fitted(name, command, user=user))
    for name in drop_ins:
        file = f"{name}.conf"
        yield Installed(folder / f"{SERVICE}.d" / file, fitted(file, command, user=user))


def _for_user(text: str) -> str:
    before, mark, rest = text.partition(_SYSTEM_ONLY)
    if mark:
        text = before + rest[rest.index(_INSTALL) + 1 :]
    return text.replace("WantedBy=multi-user.target", "WantedBy=default.target")


def _package() -> Path:
    return Path(tierkv.__file__).resolve().parent


def _home() -> Path:
    """In a wheel the files lie inside tierkv, in a checkout beside it."""
    for folder in (_package() / "systemd", _package().parent / "systemd"):
        if (folder / "units").is_dir():
            return folder
    raise TierkvError("the unit files are not installed; take them from a checkout of tierkv")
