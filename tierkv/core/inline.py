"""Drives flows to their end on the spot: for the in-process manager, tools and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tierkv.core.effects import Effect, Flow, Wait
from tierkv.errors import TierkvError, require

T = TypeVar("T")


def run_inline(flow: Flow[T], perform: Callable[[Effect], Any]) -> T:
    """Run a flow; ``perform`` carries out each effect and returns its result.

    One flow runs at a time, so nothing it waits for can be outstanding. Raises what the flow
    raises.
    """
    result: Any = None
    error: TierkvError | None = None
    while True:
        try:
            effect = flow.send(result) if error is None else flow.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        result, error = None, None
        if isinstance(effect, Wait):
            require(effect.signal.done, "a flow waits for another, but none is running")
            continue
        try:
            result = perform(effect)
        except TierkvError as failed:
            error = failed
