"""The slot sets, in numpy and native, against plain Python sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv.core.structures import Structures
from tierkv.errors import InvariantViolation
from tierkv.native.core import structures
from tierkv.native.library import load


class Slots(RuleBasedStateMachine):
    """``held`` and ``used`` are the truth; ``promises`` what holders will give back some day."""

    structures = Structures()

    @initialize(capacity=st.sampled_from([0, 1, 5, 40, 2000]))
    def start(self, capacity: int) -> None:
        self.slots = self.structures.slots(capacity, None)
        self.held: set[int] = set()
        self.used: set[int] = set()
        self.promises: list[int] = []

    def _some(self, data: Any, numbers: set[int] | list[int]) -> list[int]:
        choices = sorted(numbers)
        if not choices:
            return []
        return data.draw(st.lists(st.sampled_from(choices), unique=True, max_size=1500))

    @rule(data=st.data(), share=st.floats(0, 1))
    def hold(self, data: Any, share: float) -> None:
        count = int(share * self.slots.free_count)
        got = self.slots.hold(count).tolist()
        assert len(set(got)) == len(got) == count
        assert not set(got) & (self.held | self.used)
        self.held |= set(got)
        self.promises += got

    @rule(data=st.data())
    def unhold(self, data: Any) -> None:
        """Promises come back, also of slots that a record has taken (and not freed) since."""
        back = self._some(data, self.promises)
        self.promises = [number for number in self.promises if number not in back]
        self.slots.unhold(np.array(back, np.int64))
        self.held -= set(back)

    @rule(data=st.data(), replayed=st.booleans())
    def take(self, data: Any, replayed: bool) -> None:
        """Live records take held slots, replayed ones take any that is free."""
        free = set(range(self.slots.capacity)) - self.held - self.used
        taken = self._some(data, free if replayed else self.held)
        self.slots.take(np.array(taken, np.int64))
        self.held -= set(taken)
        self.used |= set(taken)

    @rule(data=st.data())
    def give(self, data: Any) -> None:
        back = self._some(data, self.used - set(self.promises))
        self.slots.give(np.array(back, np.int64))
        self.used -= set(back)

    @rule()
    def reindex(self) -> None:
        self.slots.reindex()
        self.held.clear()
        self.promises = []

    @rule(data=st.data())
    def wrong(self, data: Any) -> None:
        for number in self._some(data, self.used)[:1]:
            with pytest.raises(InvariantViolation, match="taken twice"):
                self.slots.take(np.array([number]))
        for number in self._some(data, set(range(self.slots.capacity)) - self.used)[:1]:
            with pytest.raises(InvariantViolation):
                self.slots.give(np.array([number]))
        with pytest.raises(InvariantViolation):
            self.slots.hold(self.slots.free_count + 1)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "slots"):
            assert self.slots.used().tolist() == sorted(self.used)
            assert self.slots.used_count == len(self.used)
            assert self.slots.held_count == len(self.held)
            assert self.slots.free_count == self.slots.capacity - len(self.used) - len(self.held)

    def teardown(self) -> None:
        if hasattr(self, "slots"):
            rest = set(self.slots.hold(self.slots.free_count).tolist())
            assert rest == set(range(self.slots.capacity)) - self.held - self.used


class NativeSlots(Slots):
    structures = structures(load({}))


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestNativeSlots = NativeSlots.TestCase
TestNativeSlots.settings = TestSlots.settings


@pytest.mark.parametrize("made_of", [Structures(), structures(load({}))], ids=["numpy", "native"])
def test_low_numbers_go_out_first(made_of: Structures) -> None:
    slots = made_of.slots(10, None)
    assert slots.hold(3).tolist() == [0, 1, 2]
    assert slots.hold(2).tolist() == [3, 4]
    slots.take(np.array([0, 4]))
    slots.reindex()
    assert slots.hold(4).tolist() == [1, 2, 3, 5]
