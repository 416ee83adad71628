"""Blocks that a worker still writes into, and copies that were made of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from recovery_harness import Daemon, Killed, chain_of, tail_content

from tierkv.core.ids import Tier
from tierkv.core.placement import Placement

Start = Callable[..., Daemon]
TAIL = [1, 2]


def test_a_copy_made_before_the_worker_wrote_on_is_not_kept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died when the block was up again, and the log did not say yet that the copy is old."""
    daemon = start(device=2, host=2, disk=0)
    namespace, lease = daemon.namespace(), daemon.hello()
    daemon.run(daemon.planner.acquire(lease, namespace, 1, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 1, 0, len(TAIL)))
    daemon.payload(daemon.slots(lease, 1)[0])[:] = tail_content(TAIL)
    daemon.planner.suspend(lease, 1)
    # Others need the room, so the open block goes down.
    daemon.run(daemon.planner.acquire(lease, namespace, 2, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 2, 0, 8))
    daemon.planner.release(lease, [2])

    def dies(_placement: Placement, _rows: object) -> None:
        daemon.write()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Placement, "reopen", dies)
        with pytest.raises(Killed):
            daemon.run(daemon.planner.resume(lease, 1))

    daemon = start()
    (sequence,) = daemon.state.sequences.values()
    assert not sequence.suspended
    assert daemon.state.blocks.has_copy(sequence.rows, Tier.DEVICE).all()
    assert not daemon.state.blocks.has_copy(sequence.rows, Tier.HOST).any()
    assert np.array_equal(daemon.payload(daemon.slots(lease, 1)[0]), tail_content(TAIL))
