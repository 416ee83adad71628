"""The listener under every kind of peer, on both event loops."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from tests.rpc.serving import LOOPS, WAIT_S, RawPeer, RecordingHandler, Serving
from tierkv.errors import ConfigError, PoolExhausted
from tierkv.rpc.connection import LINGER_S, ConnectionLimits
from tierkv.rpc.listener import bind_socket
from tierkv.rpc.messages import PROTOCOL_VERSION, Done, Failure, Greeting, Hello, Lookup, Stat
from tierkv.rpc.wire import encode


@pytest.fixture(params=LOOPS)
def loop_factory(request):
    return LOOPS[request.param]


@pytest.fixture
def arena_fd():
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 8192)
    yield fd
    os.close(fd)


@pytest.fixture
def handler(arena_fd):
    return RecordingHandler(arena_fd, arena_bytes=8192)


@pytest.fixture
def serve(handler, tmp_path, loop_factory):
    """Start a listener; keyword arguments go to Serving. Stopped at the end of the test."""
    running = []

    def start(**options):
        serving = Serving(handler, tmp_path / "s", loop_factory, **options)
        serving.__enter__()
        running.append(serving)
        return serving

    yield start
    for serving in running:
        serving.__exit__()


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def done(connection, request_id, message):
    connection.reply(request_id, Done())


def send_until_full(peer):
    """Send requests from id 2 on until the socket takes no more; how many it took whole."""
    peer.sock.setblocking(False)
    for sent in range(100_000):
        frame = encode(sent + 2, Lookup(1, b"y" * 10_000))
        try:
            whole = peer.sock.send(frame) == len(frame)
        except BlockingIOError:
            return sent
        if not whole:
            return sent
    raise AssertionError("the daemon reads without end")


def test_the_greeting_brings_the_arena_and_scratch_memory(serve, handler, arena_fd):
    with RawPeer(serve().path) as peer:
        assert peer.opening == Greeting(PROTOCOL_VERSION, 1, b"A" * 16, 8192, 4096, "serving")
        assert peer.opening_id == 0
        arena, table, scratch = peer.fds
        assert os.fstat(arena).st_ino == os.fstat(arena_fd).st_ino
        assert os.fstat(table).st_ino == os.fstat(handler.table_fd).st_ino
        assert os.fstat(scratch).st_size == 4096
        handler.wait_for(lambda: len(handler.live) == 1)
        os.pwrite(scratch, b"from the worker", 0)
        assert os.pread(handler.live[0].scratch_fd, 15, 0) == b"from the worker"
        assert handler.live[0].scratch_bytes == 4096


def test_a_worker_cannot_shrink_memory_under_the_daemon(serve):
    with RawPeer(serve().path) as peer, pytest.raises(PermissionError):
        os.ftruncate(peer.fds[2], 0)


def test_every_worker_has_scratch_memory_of_its_own(serve):
    with RawPeer(serve().path) as one, RawPeer(one.sock.getpeername()) as two:
        os.pwrite(one.fds[2], b"one", 0)
        assert os.pread(two.fds[2], 3, 0) == b"\0\0\0"


def test_the_kernel_names_the_peer(serve, handler):
    with RawPeer(serve().path):
        handler.wait_for(lambda: len(handler.live) == 1)
        assert handler.live[0].pid == os.getpid()
        assert handler.live[0].uid == os.getuid()


def test_requests_and_replies_in_any_order(serve, handler):
    waiting = []

    def answer_backwards(connection, request_id, message):
        waiting.append(request_id)
        if len(waiting) == 5:
            for other in reversed(waiting):
                connection.reply(other, Done())

    handler.answer = answer_backwards
    with RawPeer(serve().path) as peer:
        peer.hello()
        peer.sock.sendall(b"".join(bytes(encode(i, Lookup(i, b""))) for i in range(2, 7)))
        assert [peer.receive()[0] for _ in range(5)] == [6, 5, 4, 3, 2]
        assert [message.namespace for _, message in handler.requests[1:]] == [2, 3, 4, 5, 6]


def test_a_typed_error_from_the_handler_is_the_reply(serve, handler):
    def full(connection, request_id, message):
        raise PoolExhausted("no room", tier="device", asked=2)

    handler.answer = full
    with RawPeer(serve().path) as peer:
        peer.hello()
        peer.send(2, Stat())
        assert peer.receive() == (
            2,
            Failure("pool_exhausted", "no room", {"tier": "device", "asked": 2}),
        )
        peer.send(3, Stat())
        assert peer.receive()[0] == 3


def test_a_user_who_is_not_listed_is_told_so(serve, handler):
    serving = serve(uids={os.getuid() + 1})
    with RawPeer(serving.path) as peer:
        assert isinstance(peer.opening, Failure)
        assert peer.opening.code == "not_owner"
        assert peer.fds == []
        assert peer.receive() is None
    assert handler.live == handler.gone == []


def test_a_listed_user_is_served(serve):
    with RawPeer(serve(uids={os.getuid()}).path) as peer:
        peer.hello()


@pytest.mark.parametrize("state", ["recovering", "draining"])
def test_a_daemon_that_does_not_serve_says_why_and_hands_out_nothing(serve, handler, state):
    handler.state = state
    with RawPeer(serve().path) as peer:
        assert peer.opening.state == state
        assert peer.fds == []
        assert peer.receive() is None
    assert handler.live == []


def test_connections_are_limited_and_come_free_again(serve, handler):
    serving = serve(limits=ConnectionLimits(connections=2))
    with RawPeer(serving.path) as one, RawPeer(serving.path):
        with RawPeer(serving.path) as third:
            assert third.opening.code == "limit_exceeded"
            assert third.opening.details == {"limit": 2, "asked": 3}
        one.close()
        handler.wait_for(lambda: len(handler.gone) == 1)
        serving.until(lambda: len(serving.listener.connections) == 1)
        with RawPeer(serving.path) as fourth:
            fourth.hello()


GARBAGE = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "bad_magic"),
    "oversized": (struct.pack("<IBBHQ", 1 << 30, 0xA1, 0, 0, 2), "oversized"),
    "not msgpack": (struct.pack("<IBBHQ", 1, 0xA1, 0, 0, 2) + b"\xc1", "undecodable"),
    "unknown verb": (struct.pack("<IBBHQ", 5, 0xA1, 0, 0, 2) + b"\x91\xa3nay", "undecodable"),
    "wrong type": (bytes(encode(2, Hello("one"))), "undecodable"),
    "second hello": (bytes(encode(2, Hello(PROTOCOL_VERSION))), "out_of_order"),
    "id used before": (bytes(encode(1, Stat())), "out_of_order"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_that_connection_with_a_reason_and_nothing_else(serve, handler, name):
    data, reason = GARBAGE[name]
    handler.answer = done
    path = serve().path
    with RawPeer(path) as good, RawPeer(path) as bad:
        good.hello()
        bad.hello()
        bad.sock.sendall(data)
        request_id, told = bad.receive()
        assert (request_id, told.code) == (0, "protocol")
        assert told.details["reason"] == reason
        assert bad.receive() is None
        good.send(2, Stat())
        assert good.receive() == (2, Done())
    handler.wait_for(lambda: len(handler.gone) == 2)


def test_requests_before_garbage_are_still_served(serve, handler):
    handler.answer = done
    with RawPeer(serve().path) as peer:
        peer.hello()
        peer.sock.sendall(bytes(encode(2, Stat())) + b"garbage that is long enough")
        assert peer.receive() == (2, Done())
        assert peer.receive()[1].code == "protocol"
        assert peer.receive() is None


def test_a_refused_peer_that_reads_late_is_told_and_forgotten(serve, handler):
    handler.answer = lambda connection, request_id, _: connection.reply(
        request_id, Failure("internal", "x" * 1_000_000, {})
    )
    serving = serve(limits=ConnectionLimits(write_buffer_bytes=4 << 20))
    unexpected = []
    serving.loop.set_exception_handler(lambda _, context: unexpected.append(context))
    with RawPeer(serving.path) as peer:
        peer.hello()
        peer.sock.sendall(bytes(encode(2, Stat())) + b"garbage that is long enough")
        handler.wait_for(lambda: handler.gone)
        # More is left to send than the socket takes at once: it goes out after the close.
        assert peer.receive()[1].code == "internal"
        assert peer.receive()[1].code == "protocol"
        assert peer.receive() is None
        over = time.monotonic() + LINGER_S + 0.1
        serving.until(lambda: time.monotonic() > over)
    assert unexpected == []


def test_hello_comes_first(serve):
    with RawPeer(serve().path) as peer:
        peer.send(1, Stat())
        assert peer.receive()[1].details["reason"] == "out_of_order"
        assert peer.receive() is None


def test_another_protocol_version_is_told_both_numbers(serve, handler):
    with RawPeer(serve().path) as peer:
        peer.send(5, Hello(PROTOCOL_VERSION + 1))
        request_id, told = peer.receive()
        assert (request_id, told.code) == (5, "version_mismatch")
        assert told.details == {"ours": PROTOCOL_VERSION, "theirs": PROTOCOL_VERSION + 1}
        assert peer.receive() is None
    assert handler.requests == []


def test_no_more_than_in_flight_max_requests_reach_the_handler(serve, handler):
    serving = serve(limits=ConnectionLimits(in_flight=3))
    with RawPeer(serving.path) as peer:
        peer.hello()
        peer.sock.sendall(b"".join(bytes(encode(i, Stat())) for i in range(2, 12)))
        handler.wait_for(lambda: len(handler.requests) == 4)
        (connection,) = handler.live
        assert serving.call(lambda: connection.in_flight) == 3
        serving.call(connection.reply, 3, Done())
        handler.wait_for(lambda: len(handler.requests) == 5)
        assert serving.call(lambda: connection.in_flight) == 3
        handler.answer = done
        for request_id in (2, 4, 5):
            serving.call(connection.reply, request_id, Done())
        assert sorted(peer.receive()[0] for _ in range(10)) == list(range(2, 12))


def test_a_peer_that_reads_nothing_is_not_read_from(serve, handler):
    handler.answer = lambda connection, request_id, _: connection.reply(
        request_id, Failure("internal", "x" * 100_000, {})
    )
    serving = serve(limits=ConnectionLimits(write_buffer_bytes=1 << 20))
    with RawPeer(serving.path) as peer:
        peer.hello()
        sent = send_until_full(peer)
        # Replies of 100 kB: the buffers of 1 MB and of the socket hold some ten of them.
        answered = serving.call(lambda: len(handler.requests) - 1)
        assert 1 <= answered < 40
        assert sent > answered
        peer.sock.settimeout(WAIT_S)
        assert [peer.receive()[0] for _ in range(sent)] == list(range(2, sent + 2))


def test_end_of_file_ends_the_connection_once(serve, handler):
    serving = serve()
    with RawPeer(serving.path) as peer:
        peer.hello()
        peer.send(2, Stat())
        handler.wait_for(lambda: len(handler.requests) == 2)
    handler.wait_for(lambda: len(handler.gone) == 1)
    (connection,) = handler.gone
    serving.call(connection.reply, 2, Done())
    serving.call(connection.abort)
    assert not connection.open
    assert len(handler.gone) == 1


def test_a_dead_peer_is_noticed_while_its_requests_fill_the_queue(serve, handler):
    serving = serve(limits=ConnectionLimits(in_flight=1))
    peer = RawPeer(serving.path)
    peer.hello()
    peer.sock.sendall(b"".join(bytes(encode(i, Stat())) for i in range(2, 9)))
    handler.wait_for(lambda: len(handler.requests) == 2)
    peer.close()
    handler.wait_for(lambda: len(handler.gone) == 1)


def test_a_killed_worker_is_noticed_within_100_ms(serve, handler):
    serving = serve()
    script = (
        "import socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        f"s.connect({str(serving.path)!r})\n"
        "s.recv(100)\n"
        "print('connected', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"connected\n"
        handler.wait_for(lambda: len(handler.live) == 1)
        assert handler.live[0].pid == worker.pid
        killed_at = time.perf_counter()
        worker.send_signal(signal.SIGKILL)
        handler.wait_for(lambda: len(handler.gone) == 1)
        assert time.perf_counter() - killed_at < 0.1


def test_connections_leave_no_descriptors_behind(serve, handler):
    serving = serve()
    with RawPeer(serving.path) as first:
        first.hello()
    serving.until(lambda: not serving.listener.connections)
    before = serving.call(open_fds)
    for i in range(20):
        with RawPeer(serving.path) as peer:
            peer.hello()
            if i % 2:
                peer.sock.sendall(b"garbage that is long enough")
                peer.receive()
    handler.wait_for(lambda: len(handler.gone) == 21)
    serving.until(lambda: not serving.listener.connections and open_fds() == before)


def test_an_inherited_socket_needs_nothing_but_to_listen(handler, tmp_path, loop_factory):
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(tmp_path / "inherited"))
    listening.listen()
    dup = socket.socket(fileno=os.dup(listening.fileno()))
    listening.close()

    class Inherited(Serving):
        def _bind(self):
            return dup

    with (
        Inherited(handler, tmp_path / "inherited", loop_factory) as serving,
        RawPeer(serving.path) as peer,
    ):
        peer.hello()


def test_a_socket_left_by_a_dead_daemon_is_replaced(tmp_path):
    path = tmp_path / "s"
    bind_socket(path).close()
    with bind_socket(path, 0o600):
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))


def test_a_live_daemon_is_not_replaced(tmp_path):
    path = tmp_path / "s"
    with bind_socket(path), pytest.raises(ConfigError, match="another process listens"):
        bind_socket(path)


def test_a_file_is_not_taken_for_a_socket(tmp_path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_socket(path)
    assert path.read_text() == "precious"


def test_a_path_that_no_socket_can_have(tmp_path):
    with pytest.raises(ConfigError, match="socket path"):
        bind_socket(tmp_path / ("x" * 200))
