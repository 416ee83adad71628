"""The blocking client against a daemon that keeps the contract."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tierkv
from tests.client.fake_daemon import SLOTS
from tests.rpc.serving import WAIT_S
from tierkv import KVSpec
from tierkv.client.attach import default_socket_path
from tierkv.config.paths import SYSTEM_SOCKET
from tierkv.config.resolve import Environment, Space, resolve
from tierkv.config.schema import Config
from tierkv.core.prefix import chain_hashes
from tierkv.errors import (
    CorruptionError,
    InvalidArgument,
    LimitExceeded,
    PoolExhausted,
    ProtocolError,
    Unavailable,
    VersionMismatch,
)
from tierkv.rpc import messages as m
from tierkv.rpc.connection import ConnectionLimits

PROMPT = list(range(100, 111))  # 11 tokens: 2 full blocks of 4, 3 over


def fill(ns, sequence, tokens):
    """Do what an engine does: reserve, write something of its own into the slots, append."""
    sequence.reserve(len(tokens))
    for position in range(sequence.num_tokens, sequence.num_tokens + len(tokens)):
        slot = sequence.block_table[position // ns.spec.block_tokens]
        row = position % ns.spec.block_tokens
        ns.pool[slot, row * 8 : row * 8 + 8] = tokens[position - sequence.num_tokens] % 251
    sequence.append(tokens)


def test_a_prompt_is_computed_once(daemon, ns):
    with ns.begin(PROMPT) as first:
        assert first.cached_tokens == 0
        assert first.num_tokens == 0
        fill(ns, first, PROMPT)
        assert first.tokens.tolist() == PROMPT
        table = first.block_table.tolist()
    assert ns.lookup(PROMPT)[:4] == (8, 2, 0, 0)
    with ns.begin(PROMPT) as second:
        assert second.cached_tokens == 8
        assert second.cached_from == (8, 2, 0, 0)
        assert second.tokens.tolist() == PROMPT[:8]
        assert second.block_table.tolist() == table[:2]
    ns.lookup([])  # answered after what was not waited for
    assert daemon.held() == {}


def test_keep_leaves_tokens_to_compute(ns):
    with ns.begin(PROMPT) as sequence:
        fill(ns, sequence, PROMPT[:8])
    assert ns.begin(PROMPT[:8]).cached_tokens == 4
    assert ns.begin(PROMPT[:8], keep=0).cached_tokens == 8
    assert ns.begin(PROMPT[:8], keep=100).cached_tokens == 0
    assert ns.lookup(PROMPT[:8]).tokens == 8
    assert ns.lookup(PROMPT[:8], keep=1).tokens == 4
    with pytest.raises(InvalidArgument, match="keep"):
        ns.begin(PROMPT, keep=-1)


def test_names_and_checksums_on_the_wire(daemon, ns, spec):
    with ns.begin(PROMPT) as sequence:
        fill(ns, sequence, PROMPT)
    (acquire,) = [r for r in daemon.requests if isinstance(r, m.Acquire)]
    (seal,) = [r for r in daemon.requests if isinstance(r, m.Seal)]
    expected = chain_hashes(spec.digest, np.array(PROMPT, np.uint32), 4).tobytes()
    assert acquire.hashes == seal.hashes == expected
    assert seal.tokens == np.array(PROMPT[:8], "<u4").tobytes()
    assert seal.first == 0
    assert len(seal.checksums) == 32


def test_blocks_are_sealed_as_they_fill(daemon, ns):
    with ns.begin([]) as sequence:
        sequence.reserve(12)
        for token in range(9):
            fill(ns, sequence, [token])
        seals = [r for r in daemon.requests if isinstance(r, m.Seal)]
        assert [seal.first for seal in seals] == [0, 1]
        whole = chain_hashes(ns.spec.digest, np.arange(8, dtype=np.uint32), 4)
        assert seals[0].hashes + seals[1].hashes == whole.tobytes()


def test_reserving_what_is_reserved_asks_nobody(daemon, ns):
    with ns.begin([]) as sequence:
        sequence.reserve(5)
        assert len(sequence.block_table) == 2
        for _ in range(8):
            sequence.reserve(1)
            sequence.append([1])
        assert daemon.count(m.Reserve) == 1
        sequence.reserve(1)
        assert daemon.count(m.Reserve) == 2


def test_appending_what_is_not_reserved_is_refused(ns):
    with ns.begin([]) as sequence:
        with pytest.raises(InvalidArgument, match=r"reserve\(\) first"):
            sequence.append([1])
        sequence.reserve(4)
        with pytest.raises(InvalidArgument, match=r"tokens 0 to 4"):
            sequence.append([1, 2, 3, 4, 5])
        assert sequence.num_tokens == 0


def test_a_block_that_exists_is_adopted(daemon, ns):
    with ns.begin([], keep=0) as one, ns.begin([], keep=0) as two:
        fill(ns, one, PROMPT[:8])
        fill(ns, two, PROMPT[:8])
        assert two.block_table.tolist() == one.block_table.tolist()
        assert len(daemon.free) == SLOTS - 1 - 2


def test_fork_shares_and_then_copies(daemon, ns):
    with ns.begin([]) as parent:
        fill(ns, parent, PROMPT[:6])
        child = parent.fork()
        assert child.tokens.tolist() == PROMPT[:6]
        assert child.block_table.tolist() == parent.block_table.tolist()
        for side in (parent, child):
            with pytest.raises(InvalidArgument, match="reserve"):
                side.append([1])
        fill(ns, child, [1, 2, 3])
        fill(ns, parent, [4, 5, 6])
        assert child.tokens.tolist() == [*PROMPT[:6], 1, 2, 3]
        assert parent.tokens.tolist() == [*PROMPT[:6], 4, 5, 6]
        assert child.block_table[0] == parent.block_table[0]
        assert child.block_table[1] != parent.block_table[1]
        assert (ns.pool[child.block_table[1], :16] == ns.pool[parent.block_table[1], :16]).all()
        child.end()


def test_truncate_into_a_shared_block_names_it_anew(daemon, ns):
    with ns.begin([]) as sequence:
        fill(ns, sequence, PROMPT[:8])
        sealed_slot = sequence.block_table[1]
        before = sequence.tokens
        sequence.truncate(5)
        with pytest.raises(InvalidArgument, match="reserve"):
            sequence.append([7])
        fill(ns, sequence, [7, 7, 7])
        assert sequence.tokens.tolist() == [*PROMPT[:5], 7, 7, 7]
        assert before.tolist() == PROMPT[:8]
        assert sequence.block_table[1] != sealed_slot
    assert ns.lookup(PROMPT[:8]).tokens == 8
    assert ns.lookup([*PROMPT[:5], 7, 7, 7]).tokens == 8
    assert ns.lookup([*PROMPT[:5], 7, 7, 8]).tokens == 4


def test_truncate_to_more_than_there_is(ns):
    with ns.begin([]) as sequence, pytest.raises(InvalidArgument, match="has 0"):
        sequence.truncate(1)


def test_suspend_and_resume_move_the_slots(ns):
    with ns.begin([]) as sequence:
        fill(ns, sequence, PROMPT[:6])
        before = sequence.block_table
        sequence.suspend()
        assert sequence.suspended
        for forbidden in (lambda: sequence.block_table, lambda: sequence.reserve(1)):
            with pytest.raises(InvalidArgument, match="resume"):
                forbidden()
        sequence.resume()
        assert sequence.block_table[1] != before[1]
        assert (ns.pool[sequence.block_table[1], :16] == ns.pool[before[1], :16]).all()
        fill(ns, sequence, PROMPT[6:8])


def test_a_sequence_that_lost_a_block_keeps_those_before_it(daemon, ns):
    with ns.begin([]) as sequence:
        fill(ns, sequence, PROMPT)
        first = sequence.block_table[0]
        sequence.suspend()
        daemon.lost_block = 1
        with pytest.raises(CorruptionError):
            sequence.resume()
        assert sequence.suspended
        assert sequence.tokens.tolist() == PROMPT[:4]
        sequence.resume()
        assert sequence.block_table.tolist() == [first]
        fill(ns, sequence, [7] * 7)
        assert sequence.tokens.tolist() == PROMPT[:4] + [7] * 7
        sequence.suspend()
        daemon.lost_block = 2  # the partial one
        with pytest.raises(CorruptionError):
            sequence.resume()
        assert sequence.num_tokens == 8
        sequence.resume()
        fill(ns, sequence, [8] * 4)
    assert ns.lookup([*PROMPT[:4], *[7] * 4, *[8] * 4]).tokens == 12


def test_extra_keys_make_other_blocks(daemon, ns):
    keys = [None, b"cat.png"]
    with ns.begin(PROMPT, extra_keys=keys) as sequence:
        fill(ns, sequence, PROMPT)
    assert ns.lookup(PROMPT, extra_keys=keys).tokens == 8
    assert ns.lookup(PROMPT).tokens == 4
    assert ns.lookup(PROMPT, extra_keys=[None, b"dog.png"]).tokens == 4
    (seal,) = [r for r in daemon.requests if isinstance(r, m.Seal)]
    assert np.frombuffer(seal.extras, "<u8")[0] == 0
    assert np.frombuffer(seal.extras, "<u8")[1] != 0


def test_a_full_pool_changes_nothing(ns):
    with ns.begin([]) as sequence:
        fill(ns, sequence, PROMPT)
        before = sequence.block_table.tolist()
        with pytest.raises(PoolExhausted) as caught:
            sequence.reserve(10_000)
        assert caught.value.details["tier"] == "device"
        assert sequence.block_table.tolist() == before
        fill(ns, sequence, [1])


def test_ending_is_idempotent_and_final(daemon, ns, client):
    sequence = ns.begin(PROMPT)
    sequence.end()
    sequence.end()
    client.stat()  # answered after what was not waited for
    assert daemon.count(m.Release) == 1
    for verb in (lambda: sequence.append([1]), lambda: sequence.reserve(1), sequence.fork):
        with pytest.raises(InvalidArgument, match="has ended"):
            verb()


def test_release_ends_many_at_once(daemon, ns, client):
    sequences = [ns.begin(PROMPT) for _ in range(5)]
    client.release(sequences)
    client.stat()  # answered after what was not waited for
    assert daemon.count(m.Release) == 1
    assert daemon.held() == {}


def test_the_same_spec_is_the_same_namespace(daemon, client, spec):
    one, two = client.namespace(spec), client.namespace(spec)
    assert daemon.count(m.OpenNamespace) == 1
    assert one.pool is two.pool
    other = client.namespace(KVSpec(model="other", layers=1, kv_heads=1, head_dim=4))
    assert other.spec.digest != one.spec.digest


def test_an_impossible_spec_is_refused_here(daemon, client):
    with pytest.raises(InvalidArgument, match="layers"):
        client.namespace(KVSpec(model="m", layers=0, kv_heads=1, head_dim=1))
    assert daemon.count(m.OpenNamespace) == 0


def test_the_pool_is_the_daemons_memory(daemon, ns, spec):
    assert ns.pool.shape == (SLOTS, 512)
    ns.pool[3, :4] = [1, 2, 3, 4]
    assert daemon.pool(spec)[3, :4].tolist() == [1, 2, 3, 4]


def test_views_are_snapshots_nobody_can_write(ns):
    with ns.begin([]) as sequence:
        fill(ns, sequence, [1, 2, 3])
        tokens, table = sequence.tokens, sequence.block_table
        fill(ns, sequence, list(range(500)[: 4 * 20]))
        assert tokens.tolist() == [1, 2, 3]
        assert len(table) == 1
        for view in (tokens, table):
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 9


def test_wrong_tokens_are_refused_before_anything_happens(daemon, ns):
    with pytest.raises(InvalidArgument, match=r"token_ids\[1\] is 1000"):
        ns.begin([1, 1000])
    with ns.begin([]) as sequence:
        sequence.reserve(4)
        with pytest.raises(InvalidArgument, match=r"token_ids\[0\]"):
            sequence.append([-1])
        assert sequence.num_tokens == 0


def test_status_lease_and_epoch(daemon, client):
    assert client.stat() == {"epoch": 1, "slots_free": SLOTS - 1}
    assert (client.lease, client.epoch) == (1, 1)
    client.flush()
    hello = daemon.requests[0]
    assert (hello.name, hello.token) == ("test", b"")


def test_closing_ends_the_lease(daemon, spec):
    client = tierkv.connect(daemon.path)
    sequence = client.namespace(spec).begin(PROMPT)
    client.close()
    client.close()
    sequence.end()
    daemon.serving.until(lambda: not daemon.leases)
    with pytest.raises(Unavailable, match="closed"):
        client.stat()


def test_threads_share_a_client(daemon, client, ns):
    failures = []

    def work(seed):
        try:
            for i in range(20):
                with ns.begin([seed, i, 1, 2, 3]) as sequence:
                    sequence.reserve(4)
                    sequence.append([seed, i, 1, 2])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    client.stat()  # answered after what was not waited for
    assert daemon.held() == {}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 on
def test_a_forked_process_is_told_to_connect_again(client, ns):
    sequence = ns.begin(PROMPT)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        heard = b"no error"
        try:
            client.stat()
        except InvalidArgument as error:
            heard = error.message.encode()
        sequence.end()
        client.close()
        os.write(write_end, heard)
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert b"connect again in the new process" in pipe.read()
    os.waitpid(child, 0)
    client.stat()
    sequence.reserve(1)
    assert len(sequence.block_table) == 1


def test_no_daemon_is_unavailable_in_time(tmp_path):
    with pytest.raises(Unavailable, match=r"nowhere.sock"):
        tierkv.connect(tmp_path / "nowhere.sock", timeout_s=0.05)


def test_a_daemon_that_recovers_is_waited_for(daemon, spec):
    daemon.state = "recovering"
    with pytest.raises(Unavailable, match="recovering"):
        tierkv.connect(daemon.path, timeout_s=0.05)
    timer = threading.Timer(0.1, lambda: setattr(daemon, "state", "serving"))
    timer.start()
    with tierkv.connect(daemon.path, timeout_s=WAIT_S) as client:
        client.stat()
    timer.join()


def test_a_daemon_of_another_version(daemon, monkeypatch):
    theirs = m.PROTOCOL_VERSION + 1
    monkeypatch.setattr(
        daemon, "greeting", lambda: m.Greeting(theirs, 1, b"a" * 16, 0, 0, "serving")
    )
    with pytest.raises(VersionMismatch) as caught:
        tierkv.connect(daemon.path)
    assert caught.value.details == {"ours": m.PROTOCOL_VERSION, "theirs": theirs}


def test_too_many_connections_are_a_typed_error(daemon):
    daemon.stop()
    daemon.limits = ConnectionLimits(connections=1)
    daemon.start()
    with (
        tierkv.connect(daemon.path),
        pytest.raises(LimitExceeded),
    ):
        tierkv.connect(daemon.path)


def test_a_frame_the_daemon_refuses_is_told_by_its_reason(daemon, spec):
    daemon.stop()
    daemon.limits = ConnectionLimits(payload_bytes=100_000)
    daemon.start()
    with tierkv.connect(daemon.path, reconnect_s=1) as client:
        ns = client.namespace(spec)
        with pytest.raises(ProtocolError) as caught:
            ns.begin(np.zeros(1_000_000, np.int64))
        assert caught.value.details["reason"] == "oversized"
        client.stat()


def test_a_wrong_reply_is_a_protocol_error(daemon, client, monkeypatch):
    monkeypatch.setattr(daemon, "stat", lambda *_: m.Done())
    with pytest.raises(ProtocolError, match="Done where Status"):
        client.stat()


def test_a_slot_outside_of_the_pool_is_never_touched(daemon, ns, monkeypatch):
    with ns.begin([]) as sequence:
        monkeypatch.setattr(
            daemon, "reserve", lambda *_: m.Table(1, np.array([SLOTS], "<u4").tobytes(), 0)
        )
        with pytest.raises(ProtocolError, match="slot"):
            sequence.reserve(1)


def test_a_namespace_outside_of_the_arena_is_never_mapped(daemon, client, spec):
    daemon.slot_offset = 1 << 40
    with pytest.raises(ProtocolError, match="outside of the arena"):
        client.namespace(spec)


def test_where_the_daemon_is(tmp_path):
    assert default_socket_path({}, uid=0) == Path(SYSTEM_SOCKET)
    assert default_socket_path({"TIERKV_SOCKET": "/a/b"}, uid=0) == Path("/a/b")
    session = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    own = tmp_path / "tierkv" / "tierkv.sock"
    own.parent.mkdir()
    own.touch()
    assert default_socket_path(session, uid=1000) == own
    assert default_socket_path({**session, "TIERKV_SOCKET": "/a/b"}, uid=1000) == Path("/a/b")


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("variables", [{}, {"XDG_RUNTIME_DIR": "/run/user/1000"}])
def test_the_client_looks_where_the_same_users_daemon_listens(uid, variables):
    variables = {"HOME": "/home/somebody", **variables}
    environment = Environment(
        uid=uid,
        variables=variables,
        working_dir="/",
        ram_free_bytes=1 << 30,
        space=lambda _path: Space(1 << 40, 1 << 40, 0),
    )
    config = resolve(Config(), environment)
    assert str(default_socket_path(variables, uid=uid)) == config.server.socket


def test_importing_tierkv_imports_nothing_heavy():
    script = (
        "import sys, tierkv\n"
        "heavy = {'numpy', 'torch', 'msgspec', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(tierkv.__all__) <= set(dir(tierkv))\n"
        "tierkv.connect, tierkv.Client, tierkv.aio, tierkv.KVSpec\n"
        "assert 'torch' not in sys.modules\n"
        "try: tierkv.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)
