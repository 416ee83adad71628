"""The HTTP server, over TCP and over a Unix socket."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket  # paths are called socket here
from typing import Any

import pytest
import pytest_asyncio

from tierkv.errors import ConfigError
from tierkv.obs import exporter as exporter_module
from tierkv.obs.exporter import HEADER_BYTES_MAX, Exporter

pytestmark = pytest.mark.asyncio


class Daemon:
    """What the exporter shows."""

    def __init__(self) -> None:
        self.current = "serving"
        self.accepts: list[str] = []

    def exposition(self, accept: str) -> tuple[bytes, str]:
        self.accepts.append(accept)
        return b"m 1\n", "text/plain; version=0.0.4"

    def status(self) -> dict[str, Any]:
        if self.current == "broken":
            raise RuntimeError("no status")
        return {"state": self.current}

    def state(self) -> str:
        return self.current

    def exporter(self, **options: float) -> Exporter:
        return Exporter(
            exposition=self.exposition,
            status=self.status,
            history=lambda: {"hour": {}},
            state=self.state,
            **options,
        )


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest_asyncio.fixture
async def exporter(daemon: Daemon, tmp_path: Path) -> AsyncIterator[Exporter]:
    exporter = daemon.exporter()
    await exporter.start(tcp="127.0.0.1:0", socket=str(tmp_path / "m.sock"))
    yield exporter
    await exporter.close()


async def send(exporter: Exporter, request: bytes, socket: Path | None = None) -> bytes:
    """The whole answer to raw bytes."""
    if socket is None:
        reader, writer = await asyncio.open_connection("127.0.0.1", exporter.tcp_port)
    else:
        reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def get(exporter: Exporter, path: str, socket: Path | None = None) -> tuple[int, str, bytes]:
    """Status code, header and body of a GET."""
    answer = await send(exporter, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), socket)
    header, _, body = answer.partition(b"\r\n\r\n")
    text = header.decode()
    assert f"Content-Length: {len(body)}\r\n" in text
    return int(text.split(" ")[1]), text, body


async def test_pages_over_tcp_and_over_the_socket(exporter: Exporter, tmp_path: Path) -> None:
    for socket in (None, tmp_path / "m.sock"):
        code, header, body = await get(exporter, "/metrics", socket)
        assert (code, body) == (200, b"m 1\n")
        assert "Content-Type: text/plain; version=0.0.4\r\n" in header
        assert (await get(exporter, "/healthz", socket))[::2] == (200, b"ok\n")
        code, header, body = await get(exporter, "/status.json?x=1", socket)
        assert "Content-Type: application/json\r\n" in header
        assert json.loads(body) == {"state": "serving"}
        assert json.loads((await get(exporter, "/history.json", socket))[2]) == {"hour": {}}
        assert (await get(exporter, "/", socket))[2].startswith(b"<!doctype html>")


async def test_a_browser_may_bring_in_nothing_from_elsewhere(exporter: Exporter) -> None:
    policies = {}
    for path in ("/", "/status.json", "/metrics", "/nothing"):
        _, header, _ = await get(exporter, path)
        assert "X-Content-Type-Options: nosniff\r\n" in header
        policies[path] = header.partition("Content-Security-Policy: ")[2].partition("\r\n")[0]
    directives = dict(one.strip().split(" ", 1) for one in policies.pop("/").split(";"))
    assert set(policies.values()) == {"default-src 'none'"}
    assert directives["default-src"] == directives["form-action"] == "'none'"
    assert directives["connect-src"] == "'self'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", directives[name])
    page = (await get(exporter, "/"))[2].decode()
    assert not re.findall(r"(?:src|href)=.(?!data:|status.json|history.json|metrics|readyz)", page)


async def test_ready_only_while_serving(exporter: Exporter, daemon: Daemon) -> None:
    assert (await get(exporter, "/readyz"))[::2] == (200, b"serving\n")
    daemon.current = "recovering"
    assert (await get(exporter, "/readyz"))[::2] == (503, b"recovering\n")
    assert (await get(exporter, "/healthz"))[::2] == (200, b"ok\n")


async def test_the_accept_headers_are_handed_on(exporter: Exporter, daemon: Daemon) -> None:
    request = b"GET /metrics HTTP/1.1\r\naccept: a;v=1\r\nX: y\r\nAccept:b\r\n\r\n"
    await send(exporter, request)
    assert daemon.accepts == ["a;v=1,b"]


async def test_head_has_no_body(exporter: Exporter) -> None:
    answer = await send(exporter, b"HEAD /metrics HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 4\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"404 Not Found; try /, /metrics"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics\r\n\r\n", b"400 Bad Request"),
        (b"\x16\x03\x01 hello SSH-2.0\r\n\r\n", b"400 Bad Request"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEADER_BYTES_MAX, b"431 Request Header Fields"),
    ],
)
async def test_bad_requests(exporter: Exporter, request_bytes: bytes, answer: bytes) -> None:
    assert answer in await send(exporter, request_bytes)
    assert (await get(exporter, "/healthz"))[0] == 200


async def test_a_fault_in_a_page_is_a_500_and_a_log_line(
    exporter: Exporter, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.current = "broken"
    assert (await get(exporter, "/status.json"))[0] == 500
    assert "no status" in caplog.text
    assert (await get(exporter, "/healthz"))[0] == 200


async def test_a_client_that_sends_nothing_is_dropped(daemon: Daemon) -> None:
    exporter = daemon.exporter(request_timeout_s=0.05)
    await exporter.start(tcp="127.0.0.1:0")
    assert await send(exporter, b"GET /met") == b""
    await exporter.close()


async def test_a_client_that_reads_nothing_is_dropped(daemon: Daemon, tmp_path: Path) -> None:
    page_bytes = 10_000_000
    dropped = asyncio.Event()

    def exposition(accept: str) -> tuple[bytes, str]:
        # The time for the request has begun; it is over before the client reads.
        asyncio.get_running_loop().call_later(0.2, transport.resume_reading)
        return b"x" * page_bytes, "text/plain"

    exporter = Exporter(
        exposition=exposition,
        status=daemon.status,
        history=dict,
        state=daemon.state,
        request_timeout_s=0.05,
    )
    await exporter.start(socket=str(tmp_path / "m.sock"))

    class Deaf(asyncio.Protocol):
        received_bytes = 0

        def data_received(self, data: bytes) -> None:
            self.received_bytes += len(data)

        def connection_lost(self, error: Exception | None) -> None:
            dropped.set()

    transport, client = await asyncio.get_running_loop().create_unix_connection(
        Deaf, str(tmp_path / "m.sock")
    )
    # Not in connection_made(): Python 3.11.2 starts reading after it, paused or not.
    transport.pause_reading()
    transport.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    await asyncio.wait_for(dropped.wait(), 5)
    assert 0 < client.received_bytes < page_bytes
    await exporter.close()


async def test_a_page_larger_than_the_socket_s_buffer(daemon: Daemon, tmp_path: Path) -> None:
    page = b"x" * 10_000_000
    unexpected: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unexpected.append(context))
    exporter = Exporter(
        exposition=lambda accept: (page, "text/plain"),
        status=daemon.status,
        history=dict,
        state=daemon.state,
    )
    await exporter.start(socket=str(tmp_path / "m.sock"))
    answer = await send(exporter, b"GET /metrics HTTP/1.1\r\n\r\n", tmp_path / "m.sock")
    assert answer.endswith(b"\r\n\r\n" + page)
    await exporter.close()
    assert unexpected == []


async def test_connections_are_limited(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "CONNECTIONS_MAX", 1)
    exporter = daemon.exporter()
    await exporter.start(tcp="127.0.0.1:0")
    reader, idle = await asyncio.open_connection("127.0.0.1", exporter.tcp_port)
    assert await send(exporter, b"") == b""
    idle.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(b"ok\n")
    idle.close()
    await idle.wait_closed()
    await exporter.close()


async def test_closing_drops_open_connections_and_removes_the_socket(
    daemon: Daemon, tmp_path: Path
) -> None:
    socket = tmp_path / "m.sock"
    exporter = daemon.exporter()
    await exporter.start(tcp="127.0.0.1:0", socket=str(socket))
    assert stat.S_IMODE(socket.stat().st_mode) == 0o660
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(b"GET ")
    await get(exporter, "/healthz", socket)  # connections are taken in order: ours is in
    await exporter.close()
    assert await reader.read() == b""
    assert not socket.exists()
    assert exporter.tcp_port == 0
    writer.close()
    await writer.wait_closed()


async def test_another_daemons_socket_is_left_alone(exporter: Exporter, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    second = Daemon().exporter()
    with pytest.raises(ConfigError, match=r"metrics\.socket: cannot listen .* already in use"):
        await second.start(socket=str(path))
    await second.close()
    assert (await get(exporter, "/healthz", path))[0] == 200


async def test_a_dead_daemons_socket_file_is_replaced(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with Socket(AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    exporter = daemon.exporter()
    await exporter.start(socket=str(path))
    assert (await get(exporter, "/healthz", path))[0] == 200
    await exporter.close()


async def test_what_cannot_be_listened_on_is_a_configuration_error(
    exporter: Exporter, daemon: Daemon, tmp_path: Path
) -> None:
    other = daemon.exporter()
    with pytest.raises(ConfigError, match=r"metrics.tcp: cannot listen .*in use.*another port"):
        await other.start(tcp=f"127.0.0.1:{exporter.tcp_port}")
    with pytest.raises(ConfigError, match=r"metrics.socket: cannot listen .*No such file"):
        await other.start(tcp="127.0.0.1:0", socket=str(tmp_path / "none" / "m.sock"))
    assert other.tcp_port == 0
