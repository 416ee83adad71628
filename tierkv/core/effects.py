"""What the core asks the outside to do: the values its flows yield.

A flow is a generator. It decides, commits records, and yields an effect whenever bytes must move or
it must wait; its driver performs the effect and sends the result back (or throws a TierkvError).
The daemon drives flows from its event loop, tests and the in-process manager drive them inline.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tierkv.core.ids import I64, U32, U64, Bool, Tier


@dataclass(frozen=True)
class Move:
    """Copy payloads and entries from slots of one tier to slots of another (or the same) one.

    ``ids`` (u64 [n]) are the blocks that must be found in the source. Result: Moved. The driver
    makes all committed records durable enough first, so that a slot freed by them may be reused.
    """

    pool: int
    ids: U64
    source: Tier
    source_slots: I64
    target: Tier
    target_slots: I64


@dataclass(frozen=True)
class Moved:
    """``ok`` [n]: the target holds a verified copy. ``sum_hi``, ``sum_lo``: its xxh3_128."""

    ok: Bool
    sum_hi: U64
    sum_lo: U64


@dataclass(frozen=True)
class ReadHeaders:
    """Read the entries of disk slots without their payload. Result: Headers."""

    pool: int
    ids: U64
    slots: I64


@dataclass(frozen=True)
class Headers:
    """``ok`` [n]: the slot holds the block. ``tokens`` [n, block_tokens], ``extras`` [n]."""

    ok: Bool
    tokens: U32
    extras: U64


@dataclass(frozen=True)
class Check:
    """Compare the payloads of RAM slots with their entries' checksums. Result: Bool [n]."""

    pool: int
    ids: U64
    tier: Tier
    slots: I64


@dataclass
class Signal:
    """Something another flow is waiting for; set once."""

    done: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def set(self) -> None:
        """Wake everybody who waits. Mutates."""
        self.done = True
        for callback in self.callbacks:
            callback()
        self.callbacks.clear()


@dataclass(frozen=True)
class Wait:
    """Go on when the signal is set. Result: None."""

    signal: Signal


Effect = Move | ReadHeaders | Check | Wait
T = TypeVar("T")
Flow = Generator[Effect, Any, T]
"""A decision that may need the outside: yields effects, returns a T."""
