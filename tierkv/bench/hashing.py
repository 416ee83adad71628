"""Chain hashes in the worker: what it computes of a prompt before it asks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import numpy as np
import xxhash

from tierkv.bench.bars import Takes
from tierkv.bench.ceilings import program
from tierkv.bench.daemon import some_tokens, spec_of
from tierkv.bench.harness import F64, MICROSECONDS, Bench, Line, each_call
from tierkv.core.ids import U32
from tierkv.core.prefix import HASH_BYTES, chain_hashes
from tierkv.native.loops import loops

SPEC = spec_of(64)
BLOCKS = 8192
TIMES_NATIVE, TIMES_IN_PYTHON = 1.5, 10.0
"""How many times as long as C, with tierkv's own C loops and without."""

NO_LIBRARY = 3


def run(bench: Bench) -> Iterator[Line]:
    """All blocks of a prompt of 131,072 tokens."""
    place, calls = bench.same_core, bench.pick(200, 5)
    tokens = some_tokens(BLOCKS, BLOCKS * SPEC.block_tokens)
    ceiling, hashes = Ceiling(bench, tokens), loops()
    measured = bench.interleave(
        place,
        {
            "tierkv": lambda: each_call(
                lambda: hashes.chain_hashes(SPEC.digest, tokens, SPEC.block_tokens), calls
            ),
            ceiling.name: lambda: ceiling.times(calls),
        },
    )
    yield measured.line(
        f"rpc.hash.{BLOCKS}",
        MICROSECONDS,
        "tierkv",
        [ceiling.name],
        place,
        bars=[Takes(TIMES_IN_PYTHON if hashes.missing else TIMES_NATIVE, ceiling.name)],
        note="in Python" if hashes.missing else "native loops",
    )


class Ceiling:
    """A loop over the system's xxh3 in C. Without it: over Python's, of blocks cut beforehand."""

    def __init__(self, bench: Bench, tokens: U32) -> None:
        self._bench = bench
        self._block_bytes = 4 * SPEC.block_tokens
        self._path = bench.folder / "tokens"
        self._path.write_bytes(SPEC.digest + tokens.tobytes())
        self._last = chain_hashes(SPEC.digest, tokens, SPEC.block_tokens)[-1].tobytes()
        self._blocks = [bytes(HASH_BYTES) + block.tobytes() for block in tokens.reshape(BLOCKS, -1)]
        self._program = program(bench.folder, "hashes")
        self._in_c = self._program is not None and self._run(1) is not None
        self.name = "xxh3 in C" if self._in_c else "xxh3 in Python"

    def times(self, count: int) -> F64:
        """Seconds of each of ``count`` passes over all blocks, shape [count]."""
        if not self._in_c:
            digest = xxhash.xxh3_128_digest
            return each_call(lambda: [digest(block) for block in self._blocks], count)
        found = self._run(count)
        if found is None:
            raise RuntimeError("libxxhash has gone")
        return found

    def _run(self, count: int) -> F64 | None:
        command = [str(self._program), str(self._path), str(self._block_bytes), str(count)]
        process = self._bench.spawn(self._bench.same_core.client, command, stdout=subprocess.PIPE)
        said = process.communicate()[0]
        code = self._bench.reap(process)
        if code == NO_LIBRARY:
            return None
        if code or said[-HASH_BYTES:] != self._last:
            raise RuntimeError("the hashes of the ceiling are not those of the worker")
        return np.frombuffer(said[:-HASH_BYTES], np.uint64) / 1e9
