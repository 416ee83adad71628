"""The file that says what was deleted: after any crash, and after damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recovery_harness import SIZE, Machine
from tierkv_wal import RealStorage

from tierkv.errors import CorruptionError
from tierkv.service.deleted import ENTRY_BYTES, DeletedFile, Deletion
from tierkv.service.verify import verify

TOKENS = list(range(2 * SIZE))
LATER = list(range(500, 500 + 2 * SIZE))
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


def test_a_damaged_one_is_found_and_an_index_made_anew_keeps_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    daemon = machine.start()
    daemon.namespace()
    daemon.store(daemon.hello(), 1, TOKENS)
    daemon.write_behind()
    daemon.write()
    daemon.recovered.deleted.add([ONE, ALL])
    config, path = daemon.config, daemon.recovered.deleted.path
    path.write_bytes(b"x" + path.read_bytes()[1:])
    machine.crash()
    assert [one for one in verify(config, deep=False).findings if "DELETED is damaged" in one]
    daemon = machine.start()
    assert daemon.cached(TOKENS) == 2
    with pytest.raises(CorruptionError, match="move the file aside"):
        daemon.recovered.deleted.add([ONE])
    machine.crash()
    shutil.rmtree(config.server.state_dir + "/index")
    daemon = machine.start()
    assert daemon.cached(TOKENS) == 0
    # All that there was counts as deleted from now on: the slots still name it.
    (everything,) = daemon.recovered.deleted.read()
    assert daemon.state.next_block >= everything.before > 2
    assert path.with_name("quarantine").joinpath("DELETED.0").read_bytes()[:1] == b"x"
    daemon.namespace()
    daemon.store(daemon.hello(), 1, LATER)
    daemon.write_behind()
    daemon.write()
    machine.crash()
    shutil.rmtree(config.server.state_dir + "/index")
    daemon = machine.start()
    assert (daemon.cached(TOKENS), daemon.cached(LATER)) == (0, 2)
    machine.crash()


def test_ids_of_deleted_blocks_are_not_given_again(tmp_path: Path) -> None:
    """Neither index nor log are left to tell how far they went."""
    machine = Machine(tmp_path)
    for tokens in (TOKENS, LATER):  # the second time by a daemon whose ids are far above
        daemon = machine.start()
        namespace = daemon.namespace()
        daemon.store(daemon.hello(), 1, tokens)
        daemon.write_behind()
        daemon.checkpoint()
    before, state_dir = daemon.state.next_block, Path(daemon.config.server.state_dir)
    digest = daemon.state.namespaces[namespace].digest
    daemon.recovered.deleted.add([Deletion(digest, b"", before)])
    machine.crash()
    shutil.rmtree(state_dir / "index")
    shutil.rmtree(state_dir / "wal")
    daemon = machine.start()
    assert (daemon.cached(TOKENS), daemon.cached(LATER)) == (0, 0)
    assert daemon.state.next_block > before
    machine.crash()
