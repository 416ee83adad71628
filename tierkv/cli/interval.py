"""The option of commands that look again and again: how many seconds between two looks."""

from __future__ import annotations

import math
from typing import Any

import click


class Interval(click.FloatRange):
    """A tenth of a second or more, but no time that never comes."""

    def __init__(self) -> None:
        super().__init__(min=0.1)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See click.ParamType. Raises click.BadParameter."""
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds
