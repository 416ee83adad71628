"""One question and its answer, over a socket whose other end says what the test wants."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rpc.peer import Peer
from tierkv.errors import (
    InvalidArgument,
    NotOwner,
    NotReady,
    ProtocolError,
    Unavailable,
    VersionMismatch,
)
from tierkv.rpc import ask as asking
from tierkv.rpc.ask import ask
from tierkv.rpc.messages import (
    PROTOCOL_VERSION,
    Failure,
    Greeting,
    Hello,
    Message,
    Stat,
    Status,
)
from tierkv.rpc.wire import encode


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path / "s")
    yield peer
    peer.close()


def question(path: str) -> Message:
    return ask(path, Stat(), 5.0)


def test_it_asks_without_a_lease_and_keeps_no_descriptor(peer: Peer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert question(peer.path) == Status({"a": 1})
    assert peer.heard == [Hello(PROTOCOL_VERSION, "tierkv command", b"", False), Stat()]
    assert peer.hung_up.wait(5.0)  # its end of the connection is a descriptor of this process, too
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_answer_may_come_in_any_order(peer: Peer) -> None:
    peer.answers.reverse()
    assert question(peer.path) == Status({"a": 1})


def test_the_daemons_own_error_is_raised(peer: Peer) -> None:
    peer.answers[1] = (2, Failure("invalid_argument", "no", {"asked": 3}))
    with pytest.raises(InvalidArgument, match="no") as caught:
        question(peer.path)
    assert caught.value.details == {"asked": 3}


@pytest.mark.parametrize(
    ("opening", "error", "said"),
    [
        (Failure("not_owner", "user 5 may not use this daemon", {}), NotOwner, "user 5"),
        (Greeting(99, 1, b"", 0, 0, "serving"), VersionMismatch, "speaks protocol 99, this"),
        (
            Greeting(PROTOCOL_VERSION, 1, b"", 0, 0, "draining"),
            NotReady,
            "the daemon is draining",
        ),
    ],
)
def test_who_is_not_let_in_is_told_why(
    peer: Peer, opening: Message, error: type[Exception], said: str
) -> None:
    peer.opening = bytes(encode(0, opening))
    with pytest.raises(error, match=said):
        question(peer.path)


def test_something_else_listens_there(peer: Peer) -> None:
    peer.opening = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with pytest.raises(ProtocolError, match="not tierkv's"):
        question(peer.path)


def test_a_daemon_that_dies_before_it_answers(peer: Peer) -> None:
    peer.answers.clear()
    with pytest.raises(Unavailable, match="it closed the connection"):
        question(peer.path)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no daemon serves on .*No such file.*tierkv serve"):
        question(str(tmp_path / "nobody"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(Unavailable, match="Connection refused"):
        question(str(tmp_path / "dead"))


def test_the_systems_daemon_is_started_as_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "SYSTEM_SOCKET", str(tmp_path / "nobody"))
    with pytest.raises(Unavailable, match="start one by `systemctl start tierkv`"):
        question(str(tmp_path / "nobody"))


def test_who_listens_and_says_nothing_is_not_ready(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(NotReady, match="it may be recovering"):
            ask(str(tmp_path / "s"), Stat(), 0.05)


def test_a_daemon_that_hangs_is_noticed_however_long_an_answer_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "GREETING_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(NotReady, match="it may be recovering"):
            ask(str(tmp_path / "s"), Stat(), 3600.0)


def test_an_answer_may_take_longer_than_a_greeting(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "GREETING_S", 0.2)
    peer.may_answer.clear()
    late = threading.Timer(0.4, peer.may_answer.set)
    late.start()
    assert question(peer.path) == Status({"a": 1})
    late.join()


def test_who_greets_and_does_not_answer_may_have_done_it(peer: Peer) -> None:
    peer.may_answer.clear()
    with pytest.raises(NotReady, match=r"has not answered within 0\.2 s.*`tierkv status`"):
        ask(peer.path, Stat(), 0.2)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.may_skip_in_ci
def test_a_user_who_may_not_connect_is_told_what_is_missing(peer: Peer) -> None:
    os.chmod(peer.path, 0o600)
    os.seteuid(65_534)
    try:
        with pytest.raises(Unavailable, match=r"must belong to the socket's group.*allowed_uids"):
            question(peer.path)
    finally:
        os.seteuid(0)
