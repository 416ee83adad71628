"""A worker under load: random sequences over a shared tree of prompts, every byte checked.

``python -m tierkv.torture.worker SOCKET FOLDER SEED TREE`` runs until FOLDER/stop exists. It

- appends one line to FOLDER/acks-PID for every acknowledged seal, by one write each;
- while FOLDER/pause exists, suspends what it holds and says in FOLDER/paused-PID how many that is
  and what it did so far;
- ends at the first wrong byte, with exit code WRONG_BYTES, and by an exception at any other broken
  promise; else prints what it did.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tierkv
from tierkv.client.sync import Namespace, Sequence
from tierkv.errors import LeaseLost, PoolExhausted
from tierkv.torture.pattern import BRANCHES, SPECS, payload, prompt, put, wrong_token

DEPTH_MAX = 9
HELD_MAX = 5
POLL_S = 0.005
WRONG_BYTES = 9
"""Exit code of a worker that was shown a wrong byte."""


class WrongBytes(Exception):
    """A byte that nobody may ever see."""


@dataclass
class Held:
    """A sequence, and the way through the tree that its tokens follow."""

    sequence: Sequence
    namespace: Namespace
    choices: list[int]


class Worker:
    """One connection and all that is done with it. The same seed makes the same choices."""

    def __init__(self, socket: str, folder: Path, seed: int, tree: int) -> None:
        self._chance = random.Random(seed)
        self._folder = folder
        self._tree = tree
        self._held: list[Held] = []
        self._acks = os.open(
            folder / f"acks-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        self.done: Counter[str] = Counter()
        self._client = tierkv.connect(socket, timeout_s=30, reconnect_s=60)
        self._namespaces = [self._client.namespace(spec) for spec in SPECS]

    def run(self) -> None:
        """Work until told to stop, or until nobody is left who could tell."""
        parent = os.getppid()
        verbs = {
            self._begin: 4,
            self._grow: 8,
            self._put: 3,
            self._check_one: 2,
            self._read: 2,
            self._fork: 2,
            self._truncate: 1,
            self._suspend: 1,
            self._resume: 2,
            self._end: 3,
        }
        crowded = False
        while not (self._folder / "stop").exists() and os.getppid() == parent:
            if (self._folder / "pause").exists():
                self._pause()
            (verb,) = self._chance.choices(list(verbs), list(verbs.values()))
            if crowded:
                verb = self._make_room
            crowded = False
            try:
                verb()
            except PoolExhausted:
                self.done["exhausted"] += 1
                crowded = True
            except LeaseLost:
                self.done["lost"] += 1
            self._held = [held for held in self._held if not held.sequence.lost]
        self._client.close()

    # --- verbs ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if len(self._held) >= HELD_MAX:
            self._end()
        choices = [self._choice() for _ in range(self._chance.randint(1, DEPTH_MAX))]
        namespace = self._chance.choice(self._namespaces)
        tokens = prompt(self._tree, choices)
        sequence = namespace.begin(tokens, keep=self._chance.randint(0, 1))
        held = Held(sequence, namespace, choices)
        self._held.append(held)
        for tier in ("device", "host", "disk"):
            self.done[f"{tier} hits"] += getattr(sequence.cached_from, tier)
        self._check(held)
        self._write(held, tokens[sequence.num_tokens :])

    def _put(self) -> None:
        """Cache whole blocks by copy, in one piece or two, held by nobody."""
        choices = [self._choice() for _ in range(self._chance.randint(1, DEPTH_MAX))]
        namespace = self._chance.choice(self._namespaces)
        spec, tokens = namespace.spec, prompt(self._tree, choices)
        blocks = len(tokens) // spec.block_tokens
        whole = blocks * spec.block_tokens
        data = payload(spec, tokens[:whole]).reshape(blocks, spec.block_bytes)
        cut = self._chance.randint(0, blocks)
        for first, stop in ((0, cut), (cut, blocks)):
            if namespace.write(tokens, data[first:stop], first=first) < stop - first:
                return  # what is before has left the cache already
            if stop > first:
                self._acknowledged(namespace, choices, stop)
        self.done["puts"] += 1

    def _grow(self) -> None:
        held = self._pick(suspended=False)
        if held is None:
            return
        sequence = held.sequence
        tokens = prompt(self._tree, held.choices)
        while len(tokens) == sequence.num_tokens:
            if len(held.choices) == DEPTH_MAX:
                return
            held.choices.append(self._choice())
            tokens = prompt(self._tree, held.choices)
        rest = tokens[sequence.num_tokens :]
        self._write(held, rest[: self._chance.randint(1, len(rest))])

    def _fork(self) -> None:
        held = self._pick(suspended=False)
        if held is None or len(self._held) >= HELD_MAX:
            return
        child = Held(held.sequence.fork(), held.namespace, list(held.choices))
        self._held.append(child)
        self._check(child)
        self.done["forks"] += 1

    def _truncate(self) -> None:
        held = self._pick(suspended=False)
        if held is None:
            return
        held.sequence.truncate(self._chance.randint(0, held.sequence.num_tokens))
        while held.choices and len(prompt(self._tree, held.choices[:-1])) >= (
            held.sequence.num_tokens
        ):
            held.choices.pop()
        self.done["truncations"] += 1

    def _suspend(self) -> None:
        held = self._pick(suspended=False)
        if held is not None:
            held.sequence.suspend()

    def _resume(self) -> None:
        held = self._pick(suspended=True)
        if held is None:
            return
        held.sequence.resume()
        self._check(held)
        self.done["resumptions"] += 1

    def _check_one(self) -> None:
        held = self._pick(suspended=False)
        if held is not None:
            self._check(held)

    def _read(self) -> None:
        """Copy what is cached of some prompt, whoever wrote it."""
        choices = [self._choice() for _ in range(self._chance.randint(1, DEPTH_MAX))]
        namespace = self._chance.choice(self._namespaces)
        tokens, spec = prompt(self._tree, choices), namespace.spec
        out = np.zeros((len(tokens) // spec.block_tokens, spec.block_bytes), np.uint8)
        count = namespace.read(tokens, out)
        found = out[:count].reshape(-1, spec.token_bytes)
        if not np.array_equal(found, payload(spec, tokens)[: len(found)]):
            raise WrongBytes(f"{count} blocks of {choices}, {spec.model}, were read wrong")
        self.done["blocks read"] += count

    def _end(self) -> None:
        if self._held:
            self._held.pop(self._chance.randrange(len(self._held))).sequence.end()

    # --- parts ------------------------------------------------------------------------------------

    def _choice(self) -> int:
        return self._chance.randrange(BRANCHES)

    def _pick(self, *, suspended: bool) -> Held | None:
        fit = [held for held in self._held if held.sequence.suspended is suspended]
        return self._chance.choice(fit) if fit else None

    def _write(self, held: Held, tokens: list[int]) -> None:
        """Compute, write and append tokens, as an engine would; log what was acknowledged."""
        if not tokens:
            return
        sequence, spec = held.sequence, held.namespace.spec
        before = sequence.num_tokens
        sequence.reserve(len(tokens))
        computed = payload(spec, [*sequence.tokens.tolist(), *tokens])[before:]
        put(spec, held.namespace.pool, sequence.block_table, before, computed)
        sequence.append(tokens)
        full = sequence.num_tokens // spec.block_tokens
        if full > before // spec.block_tokens:
            self._acknowledged(held.namespace, held.choices, full)
            self.done["seals"] += 1
        self._check(held)

    def _acknowledged(self, namespace: Namespace, choices: list[int], blocks: int) -> None:
        """The first blocks on a way through the tree are sealed: write that down."""
        acknowledged = {
            "at": time.monotonic(),
            "model": namespace.spec.model,
            "choices": choices,
            "blocks": blocks,
            "epoch": self._client.epoch,
        }
        os.write(self._acks, json.dumps(acknowledged).encode() + b"\n")

    def _check(self, held: Held) -> None:
        """Compare all bytes of an active sequence, the partial tail included."""
        sequence = held.sequence
        expected = prompt(self._tree, held.choices)[: sequence.num_tokens]
        if sequence.tokens.tolist() != expected:
            raise WrongBytes(f"tokens {sequence.tokens.tolist()} instead of {expected}")
        at = wrong_token(
            held.namespace.spec, held.namespace.pool, sequence.block_table, sequence.tokens
        )
        if at is None:
            return
        self._client.stat()
        if sequence.lost:
            raise LeaseLost("lost while it was being read")
        raise WrongBytes(
            f"token {at} of {sequence!r}, {held.namespace.spec.model}, "
            f"{sequence.cached_tokens} tokens cached, table {sequence.block_table.tolist()}"
        )

    def _make_room(self) -> None:
        """The device tier is full of what workers map: let something spill."""
        held = self._pick(suspended=False)
        if held is None or self._chance.random() < 0.5:
            self._end()
        else:
            held.sequence.suspend()

    def _pause(self) -> None:
        for one in self._held:
            if not one.sequence.suspended and not one.sequence.lost:
                try:
                    one.sequence.suspend()
                except LeaseLost:
                    self.done["lost"] += 1
        # What a broken connection left with the daemon goes now; the answer comes before the next.
        self._client._release_orphans()
        self._client.stat()
        said = self._folder / f"paused-{os.getpid()}"
        draft = self._folder / f"pausing-{os.getpid()}"
        held = len(self._client._core.sequences)  # those that it writes from are among them
        draft.write_text(json.dumps({"held": held, "done": self.done}))
        draft.rename(said)
        while (self._folder / "pause").exists():
            time.sleep(POLL_S)
        said.unlink()


def main() -> None:
    """See the module."""
    socket, folder, seed, tree = sys.argv[1:]
    worker = Worker(socket, Path(folder), int(seed), int(tree))
    try:
        worker.run()
    except WrongBytes:
        traceback.print_exc()
        sys.exit(WRONG_BYTES)
    sys.stdout.write(json.dumps(worker.done))


if __name__ == "__main__":
    main()
