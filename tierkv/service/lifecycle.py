"""The daemon's own states, and which may follow which."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from tierkv.errors import InvariantViolation


class DaemonState(StrEnum):
    """Where the daemon is in its life; also the label in metrics, health and greetings."""

    STARTING = "starting"
    RECOVERING = "recovering"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


TRANSITIONS: dict[DaemonState, frozenset[DaemonState]] = {
    DaemonState.STARTING: frozenset({DaemonState.RECOVERING}),
    DaemonState.RECOVERING: frozenset({DaemonState.SERVING}),
    DaemonState.SERVING: frozenset({DaemonState.DRAINING}),
    DaemonState.DRAINING: frozenset({DaemonState.SERVING, DaemonState.STOPPED}),
    DaemonState.STOPPED: frozenset(),
}


class Lifecycle:
    """The current state; tells whoever listens when it changes."""

    def __init__(self) -> None:
        self.state = DaemonState.STARTING
        self.listeners: list[Callable[[DaemonState], None]] = []

    def enter(self, state: DaemonState) -> None:
        """Go on to another state. Raises InvariantViolation for a step that does not exist."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantViolation(f"the daemon cannot go from {self.state} to {state}")
        self.state = state
        for listener in self.listeners:
            listener(state)
