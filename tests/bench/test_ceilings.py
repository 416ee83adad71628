"""The programs that stand for what the machine can do: they do the work they claim to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tierkv.bench import ceilings, hashing
from tierkv.bench.ceilings import compiler, nanoseconds, program
from tierkv.bench.daemon import some_tokens
from tierkv.bench.harness import Bench

pytestmark = [
    pytest.mark.may_skip_in_ci,
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler"),
]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, quick=True)


def test_a_table_finds_every_hash_and_refuses_a_twin(bench: Bench, tmp_path: Path) -> None:
    table = program(bench.folder, "table")
    assert table is not None
    hashes = np.random.default_rng(0).integers(0, 2**63, (1000, 2), np.uint64)
    (tmp_path / "hashes").write_bytes(hashes.tobytes())

    spent = nanoseconds(bench, bench.cpus[0], [table, str(tmp_path / "hashes"), "100", "30"])

    assert spent.shape == (30,)
    assert (spent > 0).all()
    hashes[1] = hashes[0]
    (tmp_path / "hashes").write_bytes(hashes.tobytes())
    with pytest.raises(RuntimeError, match="table"):
        nanoseconds(bench, bench.cpus[0], [table, str(tmp_path / "hashes"), "100", "30"])


def test_the_hashes_in_c_are_the_workers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = some_tokens(1, hashing.BLOCKS * 16)
    ceiling = hashing.Ceiling(bench, tokens)
    assert ceiling.times(3).shape == (3,)
    monkeypatch.setattr(hashing, "chain_hashes", lambda *_: np.zeros((1, 16), np.uint8))
    with pytest.raises(RuntimeError, match="not those of the worker"):
        hashing.Ceiling(bench, tokens)


def test_without_a_compiler_python_stands_in(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "compiler", lambda: None)

    ceiling = hashing.Ceiling(bench, some_tokens(1, hashing.BLOCKS * 16))

    assert ceiling.name == "xxh3 in Python"
    assert ceiling.times(2).shape == (2,)


def test_all_sources_compile_without_a_warning(tmp_path: Path) -> None:
    sources = sorted(ceilings.SOURCES.glob("*.c"))
    assert {path.stem for path in sources} >= {"echo", "table", "hashes"}
    for source in sources:
        strict = [str(compiler()), "-O2", "-Wall", "-Wextra", "-Werror", "-c", str(source)]
        subprocess.run([*strict, "-o", str(tmp_path / "x.o")], check=True)
