"""The cache of compiled kernels: whole files or none, bounded, shared by processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tierkv_kernels.cuda.cache import VARIABLE, KernelCache, default_directory, key_of

IMAGE = bytes(range(256)) * 4
FILE_BYTES = len(IMAGE) + 48

WRITER = """
import sys
sys.path[:] = {path!r}
from pathlib import Path
from tierkv_kernels.cuda.cache import KernelCache
cache = KernelCache(Path({directory!r}), limit_bytes=6 * {file_bytes})
for i in range(200):
    cache.put(f"{{i % 10}}", bytes([i % 10]) * {image_bytes})
    found = cache.get(f"{{(i * 7) % 10}}")
    assert found in (None, bytes([(i * 7) % 10]) * {image_bytes}), i
"""


def test_what_is_put_is_got(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "not/yet/there")
    assert cache.get("a") is None
    assert cache.sizes() == {}
    cache.put("a", IMAGE)
    assert cache.get("a") == IMAGE
    assert cache.get("b") is None
    cache.put("a", b"")
    assert cache.get("a") == b""


@settings(deadline=None)
@given(cut=st.integers(0, FILE_BYTES - 1))
def test_a_torn_file_counts_as_absent(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    cache.put("a", IMAGE)
    (path,) = cache.sizes()
    path.write_bytes(path.read_bytes()[:cut])
    assert cache.get("a") is None
    cache.put("a", IMAGE)
    assert cache.get("a") == IMAGE


@settings(deadline=None)
@given(at=st.integers(0, FILE_BYTES - 1), flip=st.integers(1, 255))
def test_a_damaged_byte_counts_as_absent(
    at: int, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    cache.put("a", IMAGE)
    (path,) = cache.sizes()
    content = bytearray(path.read_bytes())
    content[at] ^= flip
    path.write_bytes(content)
    assert cache.get("a") is None


def test_those_unused_for_longest_make_room(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, limit_bytes=3 * FILE_BYTES)
    for age, key in enumerate("abc"):
        cache.put(key, IMAGE)
        (path,) = (path for path in cache.sizes() if path.stem == key)
        os.utime(path, ns=(age, age))
    assert cache.get("a") == IMAGE  # now the one used last
    cache.put("d", IMAGE)
    assert {key for key in "abcd" if cache.get(key)} == {"a", "c", "d"}


def test_one_that_is_too_large_alone_is_kept(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, limit_bytes=FILE_BYTES - 1)
    cache.put("a", IMAGE)
    cache.put("b", IMAGE)
    assert cache.get("a") is None
    assert cache.get("b") == IMAGE


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        KernelCache(tmp_path).put("a", IMAGE)
    assert list(tmp_path.iterdir()) == []


def test_processes_may_share_it(tmp_path: Path) -> None:
    code = WRITER.format(
        path=sys.path, directory=str(tmp_path), file_bytes=FILE_BYTES, image_bytes=len(IMAGE)
    )
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    cache = KernelCache(tmp_path)
    assert 1 <= len(cache.sizes()) <= 10
    assert {path.suffix for path in tmp_path.iterdir()} == {".kernel"}


def test_keys_tell_parts_apart() -> None:
    keys = [key_of(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], [])]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({VARIABLE: "/mine", "XDG_CACHE_HOME": "/cache"}, "/mine"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/tierkv/kernels"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/tierkv/kernels"),
        ({}, "~/.cache/tierkv/kernels"),
    ],
)
def test_where_it_is(environ: dict[str, str], directory: str) -> None:
    assert default_directory(environ) == Path(directory).expanduser()
