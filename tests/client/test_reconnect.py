"""The daemon dies, restarts, forgets, cuts: what the worker keeps and what it is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import msgspec
import pytest

import tierkv
from tests.client.fake_daemon import SLOTS
from tests.client.test_sync import PROMPT, fill
from tests.rpc.serving import WAIT_S
from tierkv.client.sequences import SequenceCore
from tierkv.errors import InvalidArgument, LeaseLost, Unavailable, VersionMismatch
from tierkv.rpc import messages as m


def restart_later(daemon, after_s=0.1):
    """Start a stopped daemon while the caller's next call waits for it."""
    timer = threading.Timer(after_s, daemon.start)
    timer.start()
    return timer


def test_a_sequence_outlives_the_daemon(daemon, client, ns):
    sequence = ns.begin([])
    fill(ns, sequence, PROMPT)
    table, pool = sequence.block_table.tolist(), ns.pool
    daemon.restart()
    fill(ns, sequence, [1, 2, 3])
    assert sequence.tokens.tolist() == [*PROMPT, 1, 2, 3]
    assert sequence.block_table.tolist()[:3] == table
    assert client.lease == 1
    assert client.epoch == 2
    assert ns.pool is pool
    hello = [r for r in daemon.requests if isinstance(r, m.Hello)][-1]
    assert len(hello.token) == 16


@pytest.mark.parametrize("keep_leases", [True, False])
def test_a_sequence_may_end_while_another_call_attaches(
    daemon, client, ns, monkeypatch, keep_leases
):
    sequences = [ns.begin([]) for _ in range(3)]
    lose = SequenceCore.lose

    def lose_while_another_thread_ends_all(core):
        lose(core)
        client._core.end([sequence._core for sequence in sequences])

    monkeypatch.setattr(SequenceCore, "lose", lose_while_another_thread_ends_all)
    daemon.stop(keep_leases=keep_leases)
    for lease in daemon.leases.values():
        lease.sequences.clear()
    daemon.start()
    assert client.stat()["epoch"] == 2
    assert all(sequence._core.ended for sequence in sequences)


def test_a_call_waits_for_the_daemon(daemon, client, ns):
    sequence = ns.begin([])
    daemon.stop()
    timer = restart_later(daemon)
    sequence.reserve(4)
    timer.join()
    assert len(sequence.block_table) == 1


def test_a_daemon_that_recovers_is_waited_for(daemon, client):
    daemon.stop()
    daemon.state = "recovering"
    daemon.start()
    timer = threading.Timer(0.1, lambda: setattr(daemon, "state", "serving"))
    timer.start()
    assert client.stat()["epoch"] == 2
    timer.join()


def test_a_daemon_that_does_not_come_is_unavailable_and_the_next_call_tries_again(daemon, spec):
    with tierkv.connect(daemon.path, reconnect_s=0.2) as client:
        sequence = client.namespace(spec).begin([])
        daemon.stop()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"tierkv\.sock"):
            client.stat()
        assert time.monotonic() - began < 1
        daemon.start()
        sequence.reserve(1)


def test_a_daemon_that_does_not_answer_is_unavailable_and_its_late_reply_is_ignored(daemon, spec):
    with tierkv.connect(daemon.path, call_timeout_s=0.3) as client:
        ns = client.namespace(spec)
        daemon.silent.append(m.Stat)
        with pytest.raises(Unavailable, match="in time"):
            client.stat()
        (connection,) = daemon.of_connection
        late = next(iter(connection._in_flight))
        daemon.serving.call(connection.reply, late, m.Done())
        assert ns.lookup(PROMPT).tokens == 0
        assert client.lease == 1


def test_a_daemon_that_forgot_the_lease(daemon, client, ns):
    sequence, other = ns.begin([]), ns.begin([])
    fill(ns, sequence, PROMPT)
    daemon.restart(keep_leases=False)
    for verb in (lambda: sequence.append([1]), lambda: other.reserve(1), sequence.fork):
        with pytest.raises(LeaseLost, match="begin it again"):
            verb()
    with pytest.raises(LeaseLost):
        sequence.block_table  # noqa: B018  # the property raises
    assert sequence.lost
    again = ns.begin(sequence.tokens)
    assert again.cached_tokens == 8
    assert client.lease == 2
    sequence.end()
    other.end()
    assert len(daemon.held()) == 1


def test_reserved_slots_are_not_used_after_the_daemon_forgot_them(daemon, client, ns):
    sequence = ns.begin([])
    sequence.reserve(4)
    asked = daemon.count(m.Reserve)
    daemon.restart(keep_leases=False)
    with pytest.raises(LeaseLost):
        sequence.reserve(1)
    assert daemon.count(m.Reserve) == asked


def test_a_lease_ends_with_a_connection_that_breaks(daemon, client, ns):
    sequence = ns.begin([])
    (connection,) = daemon.of_connection
    daemon.serving.call(connection.abort)
    with pytest.raises(LeaseLost):
        sequence.reserve(1)
    ns.begin([]).reserve(1)


CUTS = [
    (m.Reserve, lambda s: s.reserve(30)),
    (m.Seal, lambda s: (s.reserve(2), s.append([1, 2]))),
    (m.Truncate, lambda s: s.truncate(3)),
    (m.Suspend, lambda s: s.suspend()),
    (m.Fork, lambda s: s.fork()),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("verb", "call"), CUTS, ids=lambda cut: getattr(cut, "__name__", ""))
def test_a_request_is_sent_again_when_the_daemon_dies_over_it(daemon, client, ns, verb, call, when):
    sequence, twin = ns.begin([]), ns.begin([])
    fill(ns, sequence, PROMPT[:6])
    fill(ns, twin, [*PROMPT[6:], 1])
    call(twin)
    getattr(daemon, f"cut_{when}").append(verb)
    call(sequence)
    assert not sequence.lost
    assert sequence.num_tokens == twin.num_tokens
    numbers = sorted(daemon.held())
    assert len(numbers) == (4 if verb is m.Fork else 2)
    held = [daemon.held()[number] for number in (numbers[0], numbers[1])]
    assert len(held[0].slots) == len(held[1].slots)
    assert held[0].sealed == held[1].sealed
    assert held[0].suspended == held[1].suspended


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shared_tail_is_kept_when_the_daemon_dies_over_its_copy(daemon, client, ns, when):
    sequence = ns.begin([])
    fill(ns, sequence, PROMPT)
    tail = ns.pool[sequence.block_table[-1]].copy()
    child = sequence.fork()
    getattr(daemon, f"cut_{when}").append(m.Reserve)
    sequence.reserve(1)
    assert not sequence.lost
    assert sequence.block_table[-1] != child.block_table[-1]
    assert (ns.pool[sequence.block_table[-1]] == tail).all()
    fill(ns, sequence, [1])
    fill(ns, child, [2])
    assert sequence.block_table.tolist() == daemon.held()[1].slots


def test_a_daemon_killed_over_a_request_that_it_never_answers(daemon, client, ns):
    sequence = ns.begin([])
    daemon.silent.append(m.Reserve)
    timer = threading.Timer(0.1, daemon.restart)
    timer.start()
    sequence.reserve(4)
    timer.join()
    assert daemon.count(m.Reserve) == 2
    assert len(sequence.block_table) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_begin_and_release_are_sent_again(daemon, client, ns, when):
    getattr(daemon, f"cut_{when}").append(m.Acquire)
    sequence = ns.begin(PROMPT)
    assert len(daemon.held()) == 1
    fill(ns, sequence, PROMPT)
    getattr(daemon, f"cut_{when}").append(m.Release)
    sequence.end()
    client.stat()
    assert daemon.held() == {}


def test_resume_is_sent_again(daemon, client, ns):
    sequence = ns.begin([])
    fill(ns, sequence, PROMPT)
    sequence.suspend()
    daemon.cut_after.append(m.Resume)
    sequence.resume()
    fill(ns, sequence, [1])
    assert sequence.block_table.tolist() == daemon.held()[1].slots


def test_the_daemons_table_is_adopted(daemon, client, ns):
    sequence = ns.begin([])
    fill(ns, sequence, PROMPT)
    daemon.stop()
    held = daemon.held()[1]
    moved = daemon.take_slot()
    daemon.drop(held.slots[1:2])
    held.slots[1] = moved
    daemon.start()
    client.stat()
    assert sequence.block_table[1] == moved


@pytest.mark.parametrize("harm", ["a block", "a seal", "the tail's place", "activity", "all"])
def test_a_sequence_of_which_the_daemon_lacks_something_is_lost(daemon, client, ns, harm):
    sequence, other = ns.begin([]), ns.begin([])
    fill(ns, sequence, PROMPT)
    fill(ns, other, PROMPT)
    daemon.stop()
    held = daemon.held()[1]
    if harm == "a block":
        held.slots.pop()
    elif harm == "a seal":
        held.sealed -= 1
    elif harm == "the tail's place":
        held.slots[2] = daemon.take_slot()
    elif harm == "activity":
        held.suspended = True
    else:
        (lease,) = daemon.leases.values()
        del lease.sequences[1]
    daemon.start()
    fill(ns, other, [1])
    # Whoever uses it may be writing: the daemon must not give its slots away before it is told.
    assert list(daemon.held()) == ([2] if harm == "all" else [1, 2])
    with pytest.raises(LeaseLost):
        sequence.reserve(1)
    ns.begin([])
    assert list(daemon.held()) == [2, 3]


def test_writing_does_not_go_on_in_blocks_that_the_daemon_took_back(daemon, client, ns):
    # With durability "none" it may have lost that this truncated sequence got a block of its own.
    sequence, other = ns.begin([]), ns.begin([])
    fill(ns, sequence, PROMPT)
    held = daemon.held()[1]
    sealed, slots = held.sealed, list(held.slots)
    sequence.truncate(6)
    fill(ns, sequence, [99])
    daemon.stop()
    held.sealed, held.slots = sealed, slots
    daemon.start()
    fill(ns, other, [1])
    with pytest.raises(LeaseLost):
        sequence.reserve(1)


def test_a_sequence_that_nobody_here_knows_is_released(daemon, client, ns):
    sequence, ended = ns.begin([]), ns.begin([])
    daemon.stop()
    ended.end()
    daemon.start()
    sequence.reserve(1)
    assert list(daemon.held()) == [1]


def test_namespaces_may_have_other_numbers(daemon, client, ns, spec):
    sequence = ns.begin([])
    fill(ns, sequence, PROMPT)
    daemon.stop()
    daemon.specs = {7: spec}
    daemon.held()[1].namespace = 7
    daemon.start()
    assert ns.lookup(PROMPT).tokens == 8
    assert daemon.requests[-1].namespace == 7
    fill(ns, sequence, [1])


def test_a_pool_that_moved_has_lost_the_sequences(daemon, client, ns):
    sequence, pool = ns.begin([]), ns.pool
    daemon.stop()
    daemon.slot_offset += 4096
    daemon.start()
    with pytest.raises(LeaseLost):
        sequence.reserve(1)
    assert ns.pool is not pool
    ns.begin([])
    assert list(daemon.held()) == [2]


def test_another_arena_is_mapped_anew(daemon, client, ns, spec):
    sequence, pool = ns.begin([]), ns.pool
    fill(ns, sequence, PROMPT)
    daemon.stop()
    leases = dict(daemon.leases)
    daemon.new_arena()
    daemon.leases.update(leases)
    for lease in leases.values():
        lease.sequences.clear()
    daemon.start()
    with pytest.raises(LeaseLost):
        sequence.reserve(1)
    ns.pool[5, 0] = 77
    assert daemon.pool(spec)[5, 0] == 77
    assert pool[5, 0] != 77
    fill(ns, ns.begin([]), PROMPT)


def test_ending_never_waits_for_a_daemon_that_is_away(daemon, client, ns):
    sequence, other = ns.begin([]), ns.begin([])
    daemon.stop()
    began = time.monotonic()
    sequence.end()
    client.release([other])
    client.close()
    assert time.monotonic() - began < 1


def test_a_request_over_which_the_daemon_always_dies_is_given_up(daemon, client):
    daemon.cut_before.extend([m.Stat] * 20)
    with pytest.raises(Unavailable, match="lost 5 times"):
        client.stat()
    daemon.cut_before.clear()
    client.stat()


def test_tokens_are_recorded_when_their_seal_is_not(daemon, spec):
    with tierkv.connect(daemon.path, reconnect_s=0.1) as client:
        ns = client.namespace(spec)
        sequence = ns.begin([])
        sequence.reserve(8)
        daemon.stop()
        with pytest.raises(Unavailable):
            sequence.append(PROMPT[:5])
        assert sequence.num_tokens == 5
        daemon.start()
        sequence.append(PROMPT[5:8])
        assert ns.lookup(PROMPT).tokens == 8


def test_a_begin_that_was_given_up_is_released(daemon, spec):
    with tierkv.connect(daemon.path, call_timeout_s=0.3) as client:
        ns = client.namespace(spec)
        daemon.silent.append(m.Acquire)
        with pytest.raises(Unavailable):
            ns.begin(PROMPT)
        ns.begin(PROMPT)
        assert daemon.count(m.Release) == 1
        assert list(daemon.held()) == [2]


def test_ending_does_not_wait_for_a_call_that_waits_for_the_daemon(daemon, spec):
    client = tierkv.connect(daemon.path, timeout_s=WAIT_S, reconnect_s=WAIT_S)
    sequence = client.namespace(spec).begin([])
    daemon.stop()

    def wait():
        with pytest.raises(Unavailable, match="closed"):
            client.stat()

    waiting = threading.Thread(target=wait)
    waiting.start()
    deadline = time.monotonic() + WAIT_S
    while client._link.alive:
        assert time.monotonic() < deadline
    began = time.monotonic()
    sequence.end()
    assert time.monotonic() - began < 1
    client.close()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


def test_a_hello_that_is_never_answered_is_tried_again(daemon, spec):
    with tierkv.connect(daemon.path, timeout_s=0.3, reconnect_s=WAIT_S) as client:
        daemon.silent.append(m.Hello)
        daemon.restart()
        assert client.stat()["epoch"] == 2


def test_closing_in_another_thread_ends_a_wait(daemon, spec):
    client = tierkv.connect(daemon.path, reconnect_s=WAIT_S)
    daemon.stop()
    timer = threading.Timer(0.1, client.close)
    timer.start()
    with pytest.raises(Unavailable, match="closed"):
        client.stat()
    timer.join()


def test_a_killed_worker_holds_nothing_100_ms_later(daemon, spec):
    script = (
        "import sys, time, tierkv\n"
        f"ns = tierkv.connect({str(daemon.path)!r}).namespace("
        "tierkv.KVSpec(model='m', layers=1, kv_heads=1, head_dim=4))\n"
        "sequence = ns.begin([1, 2, 3])\n"
        "sequence.reserve(50)\n"
        "print('holding', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"holding\n"
        assert len(daemon.held()) == 1
        killed_at = time.perf_counter()
        worker.kill()
        daemon.serving.until(lambda: not daemon.leases)
        assert time.perf_counter() - killed_at < 0.1
    assert len(daemon.free) == SLOTS - 1


def test_a_ping_tells_an_absence_from_what_does_not_pass_by_itself(daemon):
    with tierkv.connect(daemon.path, reconnect_s=0) as client:
        assert client.ping()
        daemon.stop()
        assert not client.ping()
        daemon.start()
        assert client.ping()
        assert client.epoch == 2
        greet = daemon.greeting
        daemon.greeting = lambda: msgspec.structs.replace(greet(), version=99)
        daemon.restart()
        with pytest.raises(VersionMismatch, match="99"):
            client.ping()
    with pytest.raises(Unavailable, match="closed"):
        client.ping()


def test_a_foreign_sequence_cannot_be_released(daemon, client, ns, spec):
    with tierkv.connect(daemon.path) as other:
        theirs = other.namespace(spec).begin([])
        with pytest.raises(InvalidArgument, match="another client"):
            client.release([theirs])
