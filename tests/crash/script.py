"""What the daemon and its worker do while a fault is put at one of their system calls.

Everything here is the same at every run: it is what makes the n-th call a place one can name.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import tierkv
from tests.crash.daemon import START_S
from tests.crash.one_thread import DIE, LISTENS, REST, STOP, TICK
from tests.crash.pattern import SMALL, payload, put, wrong_token
from tierkv.client.core import Ask
from tierkv.client.sync import Client, Link, Sequence
from tierkv.config import schema
from tierkv.core.prefix import chain_hashes
from tierkv.core.spec import slot_stride
from tierkv.errors import TierkvError, Unavailable
from tierkv.rpc.messages import Delete, Deleted, List, Listed, Pin, Pinned, Reply, Selector
from tierkv.tiers.disk import disk_slot_bytes

SIZE = SMALL.block_tokens
CHAINS = 11
NEW_CHAIN = 100
REFUSED = "the worker was refused"
FLUSHED, DELETING, DELETED, PINNED = -1, -2, -3, -4
"""In place of a chain's number, in the log of what was acknowledged."""


def config_of(folder: Path, durability: str) -> schema.Config:
    """Small tiers and a small log, so that little work makes blocks move and segments change."""
    slot = slot_stride(SMALL.block_bytes)
    disk_slot = disk_slot_bytes(SMALL.block_bytes, SIZE)
    return schema.Config(
        server=schema.Server(socket=str(folder / "socket"), state_dir=str(folder / "state")),
        device=schema.Device(16 * slot),
        host=schema.Host(4 * slot),
        arena=schema.Arena(str(folder / "arena")),
        disk=schema.Disk(
            dir=str(folder / "data"), bytes=96 * disk_slot, segment_bytes=16 * disk_slot
        ),
        wal=schema.Wal(durability=durability, segment_bytes=8 << 10, checkpoint_bytes=4 << 10),
        index=schema.Index(map_bytes=8 << 20),
        metrics=schema.Metrics(tcp="", socket=""),
        # What a busy machine makes slow is no call of the script's.
        log=schema.Log(slow_op_s=3600.0),
    )


def chain(number: int, blocks: int) -> list[int]:
    """The tokens of a chain of blocks."""
    return [1000 * number + t for t in range(blocks * SIZE)]


@dataclass
class Acknowledged:
    """Blocks of each chain that were sealed, and those that were then flushed, as far as told.

    ``deleted`` and ``pinned`` chains are that for good. One that may have been is owed to nobody.
    """

    sealed: dict[int, int] = field(default_factory=dict)
    flushed: dict[int, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Acknowledged:
        """What a log of acknowledgements says; a line cut short was told to nobody."""
        told = cls()
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            if not line.endswith("\n"):
                break
            number, blocks = json.loads(line)
            if number == FLUSHED:
                told.flushed = dict(told.sealed)
            elif number == DELETING:
                told.sealed.pop(blocks, None)
                told.flushed.pop(blocks, None)
            elif number == DELETED:
                told.deleted.add(blocks)
            elif number == PINNED:
                told.pinned.add(blocks)
            else:
                told.sealed[number] = max(blocks, told.sealed.get(number, 0))
        return told

    @staticmethod
    def forget_unflushed(path: Path) -> None:
        """After a kill, with durability "none": the rest was never promised, nor will it be."""
        lines = path.read_text().splitlines(keepends=True)
        while lines and json.loads(lines[-1])[0] != FLUSHED:
            lines.pop()
        path.write_text("".join(lines))


class Gone(Exception):
    """The daemon has ended."""


class Worker:
    """One worker and the log of what it was told is done.

    After every step it lets the daemon come to rest. Steps raise Gone, Unavailable or
    ConnectionError once the daemon has ended.
    """

    def __init__(self, client: Client, daemon: socket.socket, acks: Path) -> None:
        self._client = client
        self._daemon = daemon
        self._acks = os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.namespace = client.namespace(SMALL)
        self.rest()

    def begin(self, number: int, blocks: int) -> Sequence:
        """A sequence on what is found of a chain, of which no byte may be wrong."""
        sequence = self.namespace.begin(chain(number, blocks), keep=0)
        self.rest()
        pool, table, tokens = self.namespace.pool, sequence.block_table, sequence.tokens
        assert tokens.tolist() == chain(number, blocks)[: len(tokens)]
        at = wrong_token(SMALL, pool, table, tokens)
        assert at is None, f"wrong bytes at token {at} of chain {number}"
        return sequence

    def extend(self, sequence: Sequence, number: int, blocks: int) -> None:
        """Write what a sequence lacks of a chain, seal it, log that it was acknowledged."""
        tokens, have = chain(number, blocks), sequence.num_tokens
        sequence.reserve(len(tokens) - have)
        self.rest()
        put(SMALL, self.namespace.pool, sequence.block_table, have, payload(SMALL, tokens)[have:])
        sequence.append(tokens[have:])
        self._log(number, blocks)
        self.rest()

    def store(self, number: int, blocks: int) -> None:
        """Leave a chain in the cache, held by nobody; every other one by copy."""
        if number % 2:
            self.write(number, blocks)
            return
        sequence = self.begin(number, blocks)
        self.extend(sequence, number, blocks)
        self.end(sequence)

    def write(self, number: int, blocks: int) -> None:
        """The same by copy: a block at a time, for more is no small part of the device tier."""
        tokens = chain(number, blocks)
        data = payload(SMALL, tokens).reshape(blocks, SMALL.block_bytes)
        for first in range(blocks):
            stop = first + 1
            with self._at_rest_between():
                cached = self.namespace.write(tokens[: stop * SIZE], data[first:stop], first=first)
            self.rest()
            if not cached:
                return  # what is before has left: a device that fails can cost that
            self._log(number, stop)

    @contextlib.contextmanager
    def _at_rest_between(self) -> Iterator[None]:
        """Between the requests of one call the daemon comes to rest, too."""
        exchange = self._client._exchange

        def exchange_and_rest(ask: Ask, deadline: float) -> Reply:
            reply = exchange(ask, deadline)
            self.rest()
            return reply

        self._client._exchange = exchange_and_rest  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._client._exchange = exchange  # type: ignore[method-assign]

    def end(self, sequence: Sequence) -> None:
        sequence.end()
        self._client.stat()  # answered after the end, for which the client does not wait
        self.rest()

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a refusal, as an engine would, which then computes without a cache."""
        try:
            step()
        except Unavailable:
            raise
        except TierkvError as error:
            print(f"{REFUSED}: {error!r}", file=sys.stderr)

    def flush(self) -> None:
        # The client's own flush would wait ten minutes for the next daemon.
        self._client._run(self._client._core.flush())
        self._log(FLUSHED, 0)
        self.rest()

    def pin(self, number: int) -> None:
        """Pin a whole chain."""
        self._client.operate(Pin(Selector(hash=self.name_of(number))), Pinned)
        self._log(PINNED, number)
        self.rest()

    def delete(self, number: int) -> None:
        """Delete a chain from its first block on."""
        self._log(DELETING, number)
        wanted = Delete(Selector(hash=self.name_of(number, 1)), really=True)
        self._client.operate(wanted, Deleted)
        self._log(DELETED, number)
        self.rest()

    def pins(self) -> set[str]:
        """Chain hashes of the last blocks of all pins."""
        return {one["hash"] for one in self._client.operate(List("pins", Selector()), Listed).items}

    def name_of(self, number: int, blocks: int = 3) -> str:
        """The chain hash of a chain's last block, or of another."""
        ids = np.array(chain(number, blocks), np.uint32)
        return chain_hashes(SMALL.digest, ids, SIZE)[-1].tobytes().hex()

    def rest(self) -> None:
        """Let the daemon do all that there is to do."""
        _tell(self._daemon, REST)

    def tick(self) -> None:
        """Let the daemon do what it does from time to time."""
        _tell(self._daemon, TICK)

    def _log(self, number: int, blocks: int) -> None:
        os.write(self._acks, json.dumps([number, blocks]).encode() + b"\n")


def _tell(daemon: socket.socket, what: bytes) -> None:
    daemon.sendall(what)
    if daemon.recv(1) != what:
        raise Gone


def _gone(_deadline: float) -> Link:
    """In place of a client's attempts to reconnect, which would wait for the next daemon."""
    raise Unavailable("the daemon has gone")


Work = Callable[[Worker], None]


def work_on(
    config: schema.Config, daemon: socket.socket, acks: Path, work: Work, end: bytes
) -> int:
    """Connect to a daemon, work until it or the work ends, then tell it ``end`` (STOP or DIE)."""
    if daemon.recv(1) != LISTENS:
        return 0
    with contextlib.suppress(Gone, Unavailable, ConnectionError):
        with tierkv.connect(config.server.socket, timeout_s=START_S) as client:
            client._attach = _gone  # type: ignore[method-assign]  # there is only this daemon
            work(Worker(client, daemon, acks))
            if end == DIE:
                daemon.sendall(DIE)
                daemon.recv(1)
                return 0
        # First let it notice that the worker has left.
        _tell(daemon, REST)
        daemon.sendall(STOP)
    return 0


def prepared(worker: Worker) -> None:
    """Makes a store with checkpoint, log, and blocks in every tier, to be killed."""
    for number in range(5):
        worker.store(number, 3)
    worker.flush()
    worker.tick()
    held = worker.begin(1, 3)
    worker.extend(held, 1, 4)
    for number in range(5, 8):
        worker.store(number, 3)


def exercised(worker: Worker) -> None:
    """Uses every path that writes: seals, spills, copies to disk, rotations, checkpoints."""
    worker.tick()
    for number in (0, 4, 6):
        worker.attempt(partial(worker.store, number, 4))
    worker.tick()
    worker.attempt(partial(_held_and_forked, worker))
    worker.attempt(worker.flush)
    for number in (3, 7):
        worker.attempt(partial(worker.store, number, 5))
    worker.tick()


def _held_and_forked(worker: Worker) -> None:
    held = worker.begin(8, 3)
    worker.extend(held, 8, 3)
    child = held.fork()
    worker.rest()
    child.truncate(SIZE + 1)
    worker.rest()
    held.suspend()
    worker.rest()
    for number in (9, 10):
        worker.store(number, 3)
    worker.tick()
    held.resume()
    worker.rest()
    worker.extend(held, 8, 5)
    worker.end(child)


def operated(worker: Worker) -> None:
    """What operators change, while there is work."""
    worker.tick()
    worker.attempt(partial(worker.pin, 4))
    worker.attempt(partial(worker.delete, 5))
    held = worker.begin(6, 3)
    worker.attempt(partial(worker.delete, 6))
    worker.attempt(partial(worker.store, 8, 3))
    worker.end(held)
    worker.tick()


def begun(worker: Worker) -> None:
    """The first hour of a store."""
    worker.tick()
    for number in range(3):
        worker.store(number, 3)
    worker.flush()


def checked(
    owed: dict[int, int], deleted: Collection[int] = (), pinned: Collection[int] = ()
) -> Work:
    """Looks for what is owed, and for what must not be, and at every byte of whatever is found."""

    def work(worker: Worker) -> None:
        missing = {worker.name_of(number) for number in pinned} - worker.pins()
        assert not missing, f"pins are lost: {missing}"
        for number in range(CHAINS):
            sequence = worker.begin(number, CHAINS)
            found, wanted = sequence.num_tokens // SIZE, owed.get(number, 0)
            assert found >= wanted, f"{found} of {wanted} blocks of chain {number} are found"
            assert not (found and number in deleted), f"chain {number} was deleted, and is found"
            worker.end(sequence)

    return work


def checked_and_used(
    owed: dict[int, int], deleted: Collection[int] = (), pinned: Collection[int] = ()
) -> Work:
    """Then stores and finds something new."""

    def work(worker: Worker) -> None:
        checked(owed, deleted, pinned)(worker)
        worker.store(NEW_CHAIN, 3)
        worker.flush()
        sequence = worker.begin(NEW_CHAIN, 3)
        assert sequence.num_tokens == 3 * SIZE
        worker.end(sequence)

    return work


SCRIPTS: dict[str, Work] = {"restart": exercised, "first start": begun, "operators": operated}
"""What runs under faults: on a prepared store, or on none."""
