"""The example file and docs/CONFIG.md, both made from the schema.

``python -m tierkv.config.docs`` run at the root of the repository writes them anew.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from tierkv.config.schema import Setting, section_types, settings
from tierkv.config.values import write_toml, write_value

EXAMPLE_PATH = Path("systemd/tierkv.toml")
MARKDOWN_PATH = Path("docs/CONFIG.md")
_WIDTH = 100

_TOML_INTRO = """\
# tierkv configuration. Every setting is shown with its default; remove the # to change one.
# TIERKV_SECTION__KEY variables and flags override this file; `tierkv config show` tells which won.
# Sizes are written as "64 MiB" or "500MB", durations as "10s", "250ms" or "5min".
# `tierkv reload` has a running daemon take over what a reload changes; all else needs a restart.
"""

_MARKDOWN_INTRO = """\
# Configuration

This page is made from `tierkv/config/schema.py`.

A value comes from the first of these that sets it:

1. a flag of `tierkv serve`: `--set section.key=value`, or the short flag named below;
2. an environment variable `TIERKV_SECTION__KEY`, such as `TIERKV_WAL__DURABILITY=power`;
3. the file: `--config FILE`, else `$TIERKV_CONFIG`, else `~/.config/tierkv/tierkv.toml`
   (or under `$XDG_CONFIG_HOME`; not for root), else `/etc/tierkv/tierkv.toml`;
4. the default.

`tierkv config show` prints every value and where it came from, `tierkv config check` tells what is
wrong with it, `tierkv config default` prints a file with all defaults.

Sizes are written with binary or decimal units (`"64 MiB"`, `"1.5GiB"`, `"500MB"`) or as plain
numbers of bytes; durations with `us`, `ms`, `s`, `min`, `h` or `d` (`"250ms"`, `"1h 30min"`) or as
plain numbers of seconds. `"auto"` lets the daemon decide when it starts.

`tierkv reload`, or SIGHUP, has a running daemon read all this anew and take over what a reload can
change: all of it or, if anything is wrong, nothing. It says which other settings have changed and
need a restart; `tierkv config show` tells the two kinds apart.
"""


def default_toml() -> str:
    """A configuration file with every setting at its default, commented out."""
    parts = [_TOML_INTRO]
    known = settings().values()
    for section, struct in section_types().items():
        parts.append(f"\n# {_first_line(struct)}\n[{section}]\n")
        for setting in known:
            if setting.section == section:
                comment = textwrap.fill(
                    " ".join([setting.description, *_remarks(setting)]),
                    _WIDTH,
                    initial_indent="# ",
                    subsequent_indent="# ",
                )
                value = write_toml(setting, setting.default)
                parts.append(f"{comment}\n#{setting.name} = {value}\n")
    return "".join(parts)


def markdown() -> str:
    """The text of docs/CONFIG.md."""
    parts = [_MARKDOWN_INTRO]
    known = settings().values()
    for section, struct in section_types().items():
        parts.append(f"\n## [{section}]\n\n{_first_line(struct)}\n\n")
        parts.append("| key | default | meaning |\n| --- | --- | --- |\n")
        for setting in known:
            if setting.section == section:
                remarks = _remarks(setting)
                if setting.flag:
                    remarks.append(f"Flag: `{setting.flag}`.")
                meaning = " ".join([setting.description, *remarks])
                default = write_toml(setting, setting.default)
                parts.append(f"| `{setting.name}` | `{default}` | {meaning} |\n")
    return "".join(parts)


def _first_line(struct: type) -> str:
    return (struct.__doc__ or "").splitlines()[0]


def _remarks(setting: Setting) -> list[str]:
    remarks = []
    if setting.choices:
        remarks.append(f"One of: {', '.join(setting.choices)}.")
    if setting.auto_is:
        remarks.append(f"Automatic: {setting.auto_is}.")
    elif setting.at_least and setting.at_least != 1:  # that no count may be 0 goes without saying
        remarks.append(f"At least {write_value(setting, setting.at_least)}.")
    if setting.off:
        remarks.append("Empty = off.")
    if setting.live:
        remarks.append("A reload changes it.")
    return remarks


if __name__ == "__main__":
    EXAMPLE_PATH.write_text(default_toml(), encoding="utf-8")
    MARKDOWN_PATH.write_text(markdown(), encoding="utf-8")
