"""A connection to the daemon that its engine never waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from tierkv.client.sync import Client, Namespace
from tierkv.core.spec import KVSpec
from tierkv.errors import (
    InvalidArgument,
    NamespaceMismatch,
    NotOwner,
    NotReady,
    TierkvError,
    Unavailable,
    VersionMismatch,
)

RETRY_S = 0.1
"""Between attempts to find a daemon: well below a second, so that hits come back with it."""

REFUSED_RETRY_S = 5.0
"""The same when it was there and refused: somebody must change something first."""

LOST = (Unavailable, NotReady)
"""The daemon is away, does not answer in time, or is not serving yet."""

REFUSED = (InvalidArgument, NamespaceMismatch, NotOwner, VersionMismatch)


class Attachment:
    """A client and its open namespaces while the daemon is there; nothing while it is not.

    ``connect`` makes a client. It is tried once here, then on a background thread until it
    succeeds. Whoever uses the namespaces says ``lost`` when a call raises one of ``LOST``.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        specs: Sequence[KVSpec],
        name: str,
        log: logging.Logger,
    ) -> None:
        self._connect = connect
        self._specs = tuple(specs)
        self._name = name
        self._log = log
        self._client: Client | None = None
        self._namespaces: tuple[Namespace, ...] | None = None
        self._change = threading.Condition()
        self._closed = False
        self._said = ""
        self._attempt()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._thread.start()

    @property
    def namespaces(self) -> tuple[Namespace, ...] | None:
        """The namespaces of the specs, in order, or None while there is no daemon."""
        return self._namespaces

    def wait(self, timeout_s: float) -> tuple[Namespace, ...] | None:
        """The same, waiting up to ``timeout_s`` for them."""
        with self._change:
            self._change.wait_for(lambda: self._namespaces is not None or self._closed, timeout_s)
            return self._namespaces

    def lost(self, error: Exception) -> None:
        """A call found the daemon gone, or not answering: do without it until it is back."""
        with self._change:
            if self._namespaces is None:
                return
            self._namespaces = None
            self._say(logging.WARNING, f"the daemon is away ({error}); going on without it")
            self._change.notify_all()

    def close(self) -> None:
        """End the connection, and with it its lease."""
        with self._change:
            self._closed, self._namespaces = True, None
            self._change.notify_all()
        self._thread.join()
        self._drop_client()

    def _keep(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._namespaces is None or self._closed)
                if self._closed:
                    return
            pause_s = self._attempt()
            with self._change:
                self._change.wait_for(lambda: self._closed, pause_s)

    def _attempt(self) -> float:
        """Try to attach; how long to wait before the next attempt."""
        self._drop_client()
        try:
            self._client = self._connect()
            namespaces = tuple(self._client.namespace(spec) for spec in self._specs)
        except TierkvError as error:
            self._say(logging.WARNING, f"no daemon to use, going on without it: {error}")
            return REFUSED_RETRY_S if isinstance(error, REFUSED) else RETRY_S
        except Exception as error:  # an engine must not lose its cache for good over our fault
            self._say(logging.ERROR, f"cannot attach, going on without the daemon: {error!r}")
            return REFUSED_RETRY_S
        with self._change:
            self._namespaces = namespaces
            self._change.notify_all()
        self._say(logging.INFO, f"attached to the daemon, lease {self._client.lease}")
        return 0.0

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(TierkvError):
                client.close()

    def _say(self, level: int, text: str) -> None:
        """Once for each change, not for each attempt."""
        if text != self._said:
            self._said = text
            self._log.log(level, "%s: %s", self._name, text)
