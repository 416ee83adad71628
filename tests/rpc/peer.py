"""Test support: a process that listens as a daemon does, and says what the test wants."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from tierkv.rpc.messages import PROTOCOL_VERSION, Greeting, Message, Status, Welcome
from tierkv.rpc.wire import FrameDecoder, decode_request, encode

GREETING = Greeting(PROTOCOL_VERSION, 1, b"", 0, 0, "serving")
WELCOME = Welcome(0, b"", 1, False, [])
Answer = tuple[int, Message]


class Peer:
    """Greets whoever connects, reads two requests, answers, and closes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.opening: bytes = bytes(encode(0, GREETING))
        self.answers: list[Answer] = [(1, WELCOME), (2, Status({"a": 1}))]
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.hung_up = threading.Event()
        self.heard: list[Message] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return  # closed: the test is over
            with sock, suppress(ConnectionError):
                null = os.open(os.devnull, os.O_RDONLY)
                socket.send_fds(sock, [self.opening], [null])
                os.close(null)
                self._hear(sock)
                self.may_answer.wait()
                for request_id, message in self.answers:
                    sock.sendall(encode(request_id, message))
            self.hung_up.set()

    def _hear(self, sock: socket.socket) -> None:
        decoder = FrameDecoder()
        while len(self.heard) < 2:
            count = sock.recv_into(decoder.writable())
            if not count:
                return
            decoder.received(count)
            while frame := decoder.next():
                self.heard.append(decode_request(frame.payload))
