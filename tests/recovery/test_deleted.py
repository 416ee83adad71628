"""The file that says what was deleted: after any crash, and after damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from tierkv_wal import RealStorage

from tierkv.errors import CorruptionError
from tierkv.service.deleted import ENTRY_BYTES, DeletedFile, Deletion

ONE = Deletion(b"d" * 16, b"n" * 16, 7)
ALL = Deletion(b"e" * 16, b"", 2**40)


@pytest.fixture
def file(tmp_path: Path) -> DeletedFile:
    return DeletedFile(tmp_path, RealStorage())


def test_it_says_what_was_added(file: DeletedFile) -> None:
    assert file.read() == []
    file.add([ONE, ALL])
    file.add([ONE])
    assert file.read() == [ONE, ALL, ONE]
    assert file.path.stat().st_size == 3 * ENTRY_BYTES


@pytest.mark.parametrize("size", range(ENTRY_BYTES))
def test_an_entry_that_was_not_written_whole_gives_way_to_the_next(
    file: DeletedFile, size: int
) -> None:
    file.add([ONE])
    with file.path.open("ab") as out:
        out.write(ALL.encode()[:size])
    assert file.read() == [ONE]
    file.add([ALL])
    assert file.read() == [ONE, ALL]


def test_any_damage_but_in_the_last_entry_is_an_error(file: DeletedFile) -> None:
    file.add([ONE, ALL])
    whole = file.path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        file.path.write_bytes(damaged)
        if at >= ENTRY_BYTES:
            assert file.read() == [ONE]
            continue
        with pytest.raises(CorruptionError, match="DELETED is damaged at byte 0"):
            file.read()
        with pytest.raises(CorruptionError):
            file.add([ONE])
