"""One setting's value: read from TOML or text, checked against its range, written back."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from tierkv.config.schema import AUTO, Kind, Setting
from tierkv.errors import InvalidArgument
from tierkv.units import format_bytes, format_duration, parse_bytes, parse_duration

_EXPECTED = {
    Kind.TEXT: 'text, such as "kill"',
    Kind.PATH: 'a path, such as "/var/lib/tierkv"',
    Kind.COUNT: "a whole number, such as 64",
    Kind.BYTES: 'a byte size, such as "64 MiB"',
    Kind.DURATION: 'a duration, such as "10s"',
    Kind.UIDS: "user ids, such as [0, 1000]",
}


def read_value(setting: Setting, raw: object) -> Any:
    """The value of a setting from what TOML, the environment (text) or a flag (text) holds.

    Raises InvalidArgument("what; what to do").
    """
    automatic = raw == AUTO or (raw == "" and not setting.off)
    if automatic and setting.auto_is:
        return setting.auto
    try:
        value = _convert(setting, raw)
    except (ValueError, OverflowError) as error:
        what = "a number of so many digits does not fit"
        raise InvalidArgument(f"{what}; write {_EXPECTED[setting.kind]}") from error
    if setting.choices and value not in setting.choices:
        raise InvalidArgument(f"{value!r} is not known; write one of {', '.join(setting.choices)}")
    # A budget's lowest number stands for "auto", which has been dealt with.
    at_least = 0 if setting.auto_is else setting.at_least
    if setting.kind in (Kind.COUNT, Kind.BYTES, Kind.DURATION) and value < (at_least or 0):
        lowest = write_value(setting, at_least)
        raise InvalidArgument(f"{raw!r} is too small; write {lowest} or more")
    return value


def _convert(setting: Setting, raw: object) -> Any:
    kind = setting.kind
    if kind in (Kind.TEXT, Kind.PATH):
        if isinstance(raw, str) and "\0" not in raw:
            return raw
    elif kind is Kind.COUNT:
        if _is_whole(raw):
            return raw
        if isinstance(raw, str) and raw.strip().isdecimal():
            return int(raw)
    elif kind is Kind.BYTES:
        if _is_whole(raw):
            return raw
        if isinstance(raw, str):
            return parse_bytes(raw)
    elif kind is Kind.DURATION:
        if _is_whole(raw) or (isinstance(raw, float) and isfinite(raw)):
            return float(raw)  # type: ignore[arg-type]  # an int, as _is_whole says
        if isinstance(raw, str):
            return parse_duration(raw)
    elif kind is Kind.UIDS:
        parts = raw
        if isinstance(raw, str):  # with the brackets of a file, or without
            inner = raw.strip().removeprefix("[").removesuffix("]")
            parts = [part.strip() for part in inner.split(",")]
        if parts == [""]:
            return ()
        if isinstance(parts, list) and all(_is_uid(part) for part in parts):
            return tuple(int(part) for part in parts)
    raise InvalidArgument(f"{raw!r} does not fit; write {_EXPECTED[kind]}")


def _is_whole(raw: object) -> bool:
    return isinstance(raw, int) and not isinstance(raw, bool)


def _is_uid(part: object) -> bool:
    if isinstance(part, str):
        return part.isdecimal()
    return isinstance(part, int) and not isinstance(part, bool) and part >= 0


def write_value(setting: Setting, value: Any) -> str:
    """The value as text that ``read_value`` reads back."""
    if setting.auto_is and value == setting.auto:
        return AUTO
    if setting.kind is Kind.BYTES:
        return format_bytes(value)
    if setting.kind is Kind.DURATION:
        return format_duration(value)
    if setting.kind is Kind.UIDS:
        return ",".join(str(uid) for uid in value)
    return str(value)


def write_toml(setting: Setting, value: Any) -> str:
    """The value as it stands in a TOML file."""
    if setting.kind is Kind.COUNT:
        return str(value)
    if setting.kind is Kind.UIDS:
        return f"[{', '.join(str(uid) for uid in value)}]"
    # A JSON string is a TOML basic string.
    return json.dumps(write_value(setting, value), ensure_ascii=False)
