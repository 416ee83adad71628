"""The daemon's listening sockets: those that the service manager opened, else its own."""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path
from typing import NamedTuple

from tierkv.config.schema import Config
from tierkv.errors import ConfigError
from tierkv.obs.exporter import Exporter
from tierkv.rpc.listener import bind_socket
from tierkv.service.systemd import Inherited, take_socket

log = logging.getLogger(__name__)


class Sockets(NamedTuple):
    """``workers``: where workers connect; ``pages``: one for the pages, if it was passed on."""

    workers: socket.socket
    pages: socket.socket | None


def open_sockets(
    config: Config, inherited: list[Inherited], leaving: contextlib.ExitStack
) -> Sockets:
    """Take both out of ``inherited``, or bind the workers'.

    On leaving they are closed, and a file of our own is removed. Raises ConfigError.
    """
    pages = take_socket(inherited, "metrics")
    if pages is not None:
        leaving.callback(pages.close)
    workers = take_socket(inherited, "rpc", or_any=True)
    configured = config.server.socket
    if workers is None:
        workers = _own_socket(Path(configured))
        leaving.callback(Path(configured).unlink, missing_ok=True)
    elif (passed := workers.getsockname()) != configured:
        log.warning(
            "listening on %s, which the service manager opened, and not on server.socket, %s",
            passed,
            configured,
        )
    leaving.callback(workers.close)
    return Sockets(workers, pages)


async def start_exporter(exporter: Exporter, config: Config, pages: socket.socket | None) -> None:
    """Serve the pages where the configuration says, and on a socket that was passed on."""
    if config.metrics.socket and pages is None:
        _make_parent("metrics.socket", Path(config.metrics.socket))
    await exporter.start(tcp=config.metrics.tcp, socket=config.metrics.socket, passed=pages)


def _own_socket(path: Path) -> socket.socket:
    _make_parent("server.socket", path)
    return bind_socket(path)


def _make_parent(key: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot make {path.parent}: {error.strerror}; choose another path"
        ) from error
