"""The fingerprint of weights: their bytes, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tierkv.errors import InvalidArgument
from tierkv.integrations.weights import SETTLED_S, memory_file, weights_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with two files of weights."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model-00001.safetensors").write_bytes(os.urandom(100_000))
    (model / "model-00002.safetensors").write_bytes(os.urandom(50_000))
    (model / "tokenizer.json").write_text("{}")
    return model


def age(folder: Path) -> None:
    """Wait until the folder's files have settled."""
    newest = max(file.stat().st_ctime for file in folder.iterdir())
    time.sleep(max(0.0, newest + SETTLED_S + 0.05 - time.time()))


def test_another_path_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    """A folder that was moved, or is reached by a link, has the same weights."""
    first = weights_fingerprint(folder)
    link = tmp_path / "elsewhere"
    link.symlink_to(folder)
    assert weights_fingerprint(link) == first
    folder.rename(tmp_path / "moved")
    assert weights_fingerprint(tmp_path / "moved") == first


@pytest.mark.parametrize("at", [0, 49_999])
def test_one_byte_is_another_model(folder: Path, at: int) -> None:
    """The first and the last byte count."""
    first = weights_fingerprint(folder)
    file = folder / "model-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert weights_fingerprint(folder) != first


def test_swapped_files_are_another_model(folder: Path) -> None:
    """Which file has which bytes counts."""
    first = weights_fingerprint(folder)
    one, two = sorted(folder.glob("*.safetensors"))
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    assert weights_fingerprint(folder) != first


def test_what_is_no_weight_does_not_count(folder: Path) -> None:
    """Another tokenizer gives other tokens, not other KV."""
    first = weights_fingerprint(folder)
    (folder / "tokenizer.json").write_text('{"other": 1}')
    assert weights_fingerprint(folder) == first


def test_a_single_file(folder: Path) -> None:
    """A file's name does not count."""
    file = folder / "model-00001.safetensors"
    first = weights_fingerprint(file)
    assert weights_fingerprint(file.rename(folder / "other.gguf")) == first


def test_remembered_digests_are_used(folder: Path, tmp_path: Path) -> None:
    """Files that have not changed since are not read again."""
    memory = tmp_path / "cache" / "weights.json"
    age(folder)
    first = weights_fingerprint(folder, memory)
    remembered = json.loads(memory.read_text())
    assert len(remembered) == 2
    memory.write_text(json.dumps(dict.fromkeys(remembered, "0" * 32)))
    assert weights_fingerprint(folder, memory) != first, "the digests are not from the memory"


def test_new_weights_under_the_same_path_are_read(folder: Path, tmp_path: Path) -> None:
    """Also when size and modification time are put back to what they were."""
    memory = tmp_path / "weights.json"
    age(folder)
    first = weights_fingerprint(folder, memory)
    file = folder / "model-00001.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"new weights")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_fingerprint(folder, memory) != first


def test_a_file_that_just_changed_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    """It may change again within the clock's step."""
    memory = tmp_path / "weights.json"
    weights_fingerprint(folder, memory)
    assert json.loads(memory.read_text()) == {}


def test_a_damaged_memory_costs_only_time(folder: Path, tmp_path: Path) -> None:
    """What cannot be read is not remembered."""
    memory = tmp_path / "weights.json"
    first = weights_fingerprint(folder)
    for content in ("", "[1]", "{"):
        memory.write_text(content)
        assert weights_fingerprint(folder, memory) == first


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """It says what would be one."""
    with pytest.raises(InvalidArgument, match="safetensors"):
        weights_fingerprint(tmp_path)
    with pytest.raises(InvalidArgument, match="no weights"):
        weights_fingerprint(tmp_path / "absent")


def test_the_memory_is_in_the_users_cache() -> None:
    """By the XDG rules."""
    assert memory_file({"HOME": "/h"}) == Path("/h/.cache/tierkv/weights.json")
    assert memory_file({"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/c/tierkv/weights.json")
