"""Prompts and payloads of the crash tests: those of ``tierkv torture``."""

from tierkv.torture.pattern import (
    BRANCHES,
    LARGE,
    SMALL,
    SPECS,
    payload,
    prompt,
    put,
    rows,
    wrong_token,
)

__all__ = [
    "BRANCHES",
    "LARGE",
    "SMALL",
    "SPECS",
    "payload",
    "prompt",
    "put",
    "rows",
    "wrong_token",
]
