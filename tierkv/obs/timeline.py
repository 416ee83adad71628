"""Where the time of one request went: the phases that it consisted of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time. ``began_s``: monotonic; ``blocks``: how many it was about.

    Phases of one request follow each other. What lies between them was spent deciding.
    """

    name: str
    began_s: float
    seconds: float
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request that was answered. ``seconds`` until its reply; ``ids`` say what it was about.

    ``patient``: to wait is what it is for.
    """

    verb: str
    code: str
    began_s: float
    seconds: float
    phases: list[Phase]
    patient: bool = False
    ids: Mapping[str, object] = field(default_factory=dict)

    def totals(self) -> dict[str, float]:
        """Seconds and blocks by phase, as fields of a log line; ``plan_s`` is what is left."""
        found: dict[str, float] = {}
        for phase in self.phases:
            found[f"{phase.name}_s"] = found.get(f"{phase.name}_s", 0.0) + phase.seconds
            if phase.blocks:
                name = f"{phase.name}_blocks"
                found[name] = found.get(name, 0) + phase.blocks
        plan_s = self.seconds - sum(phase.seconds for phase in self.phases)
        return {"plan_s": max(0.0, plan_s), **found}
