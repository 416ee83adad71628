"""Layers of configuration: defaults < file < environment < flags, each value with its origin."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tierkv.config.check import check
from tierkv.config.lines import key_lines, line_of
from tierkv.config.resolve import Environment, resolve
from tierkv.config.schema import Config, Setting, section_types, settings
from tierkv.config.values import read_value
from tierkv.errors import ConfigError, InvalidArgument

SYSTEM_FILE = Path("/etc/tierkv/tierkv.toml")
FILE_VARIABLE = "TIERKV_CONFIG"
DEFAULT = "default"
"""Origin of a value that nobody set."""

_SECTION_WORDS = {
    "gpu": "device",
    "ram": "device",
    "nvme": "disk",
    "ssd": "disk",
    "logging": "log",
    "prometheus": "metrics",
}
"""Words that people try for a section, where likeness of spelling does not help."""


class Loaded(NamedTuple):
    """A checked configuration: as written, with all automatic values decided, and its origins."""

    written: Config
    config: Config
    origins: dict[str, str]


class _Given(NamedTuple):
    key: str
    raw: object
    origin: str


def default_file(environment: Environment) -> Path | None:
    """The configuration file that is read when none is named, or None if there is none.

    $TIERKV_CONFIG, else tierkv/tierkv.toml in the user's configuration directory (not for root),
    else /etc/tierkv/tierkv.toml.
    """
    variables = environment.variables
    if named := variables.get(FILE_VARIABLE):
        return Path(named)
    candidates = [SYSTEM_FILE]
    if environment.uid != 0:
        home = variables.get("XDG_CONFIG_HOME") or f"{variables.get('HOME', '')}/.config"
        candidates.insert(0, Path(home) / "tierkv" / "tierkv.toml")
    # os.path.isfile: what this user may not look into is not there for it, and no failure.
    return next((path for path in candidates if os.path.isfile(path)), None)


def load(file: Path | None, environment: Environment, flags: Mapping[str, str]) -> Loaded:
    """The configuration from all layers.

    ``flags`` maps keys ("wal.durability") or short flags ("--durability") to text; later ones win.

    Raises ConfigError with every problem found: key, what, where it was written, what to do.
    """
    known = settings()
    given = [*_from_file(file), *_from_variables(environment.variables), *_from_flags(flags)]
    values: dict[str, Any] = {key: setting.default for key, setting in known.items()}
    origins = dict.fromkeys(known, DEFAULT)
    problems = []
    for key, raw, origin in given:
        if key not in known:
            problems.append(_unknown(key, origin, known))
            continue
        origins[key] = origin
        try:
            values[key] = read_value(known[key], raw)
        except InvalidArgument as error:
            what, _, advice = error.message.partition("; ")
            problems.append(f"{key}: {what} ({origin}); {advice}")
    _raise_all(problems)

    written = _build(values)
    config = resolve(written, environment)
    _raise_all(
        [
            f"{key}: {what} ({origins[key]}); {advice}"
            for key, what, advice in check(config, environment.space)
        ]
    )
    return Loaded(written, config, origins)


def _build(values: dict[str, Any]) -> Config:
    sections = {}
    for section, struct in section_types().items():
        prefix = f"{section}."
        fields = {
            key.removeprefix(prefix): value
            for key, value in values.items()
            if key.startswith(prefix)
        }
        sections[section] = struct(**fields)
    return Config(**sections)  # type: ignore[arg-type]  # section_types() pairs names and types


def _raise_all(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"the configuration has {len(problems)} problems:{listed}")


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    try:
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration: {error.strerror} ({file}); "
            "name another file by --config, or make it readable"
        ) from error
    except (ValueError, RecursionError) as error:  # tomllib's and UTF-8's say the position
        raise ConfigError(f"{error} ({file}); correct the file's syntax (toml.io)") from error
    lines = key_lines(text)
    for section, entries in document.items():
        if isinstance(entries, dict) and entries:
            for name, raw in entries.items():
                yield _Given(f"{section}.{name}", raw, f"{file}:{line_of(lines, (section, name))}")
        elif entries != {} or section not in section_types():
            yield _Given(section, entries, f"{file}:{line_of(lines, (section,))}")


def _from_variables(variables: Mapping[str, str]) -> Iterator[_Given]:
    for variable, raw in sorted(variables.items()):
        section, separator, name = variable.removeprefix("TIERKV_").partition("__")
        if variable.startswith("TIERKV_") and separator:
            yield _Given(f"{section.lower()}.{name.lower()}", raw, f"env {variable}")


def _from_flags(flags: Mapping[str, str]) -> Iterator[_Given]:
    key_by_flag = {setting.flag: setting.key for setting in settings().values() if setting.flag}
    for name, raw in flags.items():
        if name in key_by_flag:
            yield _Given(key_by_flag[name], raw, f"flag {name}")
        else:
            yield _Given(name, raw, f"flag --set {name}")


def _unknown(key: str, origin: str, known: dict[str, Setting]) -> str:
    what = "unknown key" if "." in key else "not a section"
    nearest = nearest_key(key, known)
    advice = f"did you mean {nearest}?" if nearest else "`tierkv config default` lists all keys"
    return f"{key}: {what} ({origin}); {advice}"


def nearest_key(key: str, known: Mapping[str, Setting]) -> str | None:
    """The known key that was probably meant: same or similar section first, then any section."""
    section, _, name = key.rpartition(".")
    by_section: dict[str, list[str]] = {}
    for setting in known.values():
        by_section.setdefault(setting.section, []).append(setting.name)
    if not section:
        section, name = name, ""
    meant = _SECTION_WORDS.get(section) or _closest(section, list(by_section))
    if meant and not name:
        return f"[{meant}]"
    if meant and (close := _closest(name, by_section[meant])):
        return f"{meant}.{close}"
    name = name or section
    for other, names in by_section.items():
        if name in names:
            return f"{other}.{name}"
    close = _closest(name, [name for names in by_section.values() for name in names])
    return next((item.key for item in known.values() if item.name == close), None)


def _closest(word: str, words: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.6)), None)
