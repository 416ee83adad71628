"""What a new configuration changes in a running daemon, and what has to wait for a restart."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from tierkv.config.schema import Config, Setting, settings


class Change(NamedTuple):
    """``config`` is what holds from now on; ``changed`` and ``needs_restart`` are keys."""

    config: Config
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def take_over(running: Config, wanted: Config) -> Change:
    """The running configuration with all live settings as wanted; both are resolved ones."""
    differing = [
        setting
        for setting in settings().values()
        if value_of(running, setting) != value_of(wanted, setting)
    ]
    sections: dict[str, dict[str, Any]] = {}
    for setting in differing:
        if setting.live:
            values = sections.setdefault(setting.section, {})
            values[setting.name] = value_of(wanted, setting)
    return Change(
        replace(
            running,
            **{name: replace(getattr(running, name), **new) for name, new in sections.items()},
        ),
        tuple(setting.key for setting in differing if setting.live),
        tuple(setting.key for setting in differing if not setting.live),
    )


def value_of(config: Config, setting: Setting) -> Any:
    """The value that a setting has in a configuration."""
    return getattr(getattr(config, setting.section), setting.name)
