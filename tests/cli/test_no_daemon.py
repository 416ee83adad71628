"""What every command that asks a daemon says when there is none, or none that lets it in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rpc.peer import Peer
from tierkv.rpc.messages import Failure
from tierkv.rpc.wire import encode

Run = Callable[..., tuple[int, str, str]]

ASKING = [
    ["status"],
    ["status", "--watch"],
    ["stat"],
    ["ls"],
    ["inspect", "namespace/1"],
    ["pin", "--tenant", "t"],
    ["unpin", "--tenant", "t"],
    ["delete", "--tenant", "t", "--yes"],
    ["warm"],
    ["drain"],
    ["reload"],
    ["export", "warm.set"],
    ["import", "empty.toml"],
]


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_no_daemon_is_3_and_says_where_and_what_to_do(
    tierkv: Run, tmp_path: Path, command: list[str]
) -> None:
    code, out, err = tierkv(*command, "--socket", str(tmp_path / "nobody"))
    assert (code, out) == (3, "")
    assert err.startswith(f"tierkv: no daemon serves on {tmp_path / 'nobody'}: No such file")
    assert "tierkv serve" in err
    assert err.count("\n") == 1


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path / "s")
    peer.opening = bytes(encode(0, Failure("not_owner", "user 5 may not use this daemon", {})))
    yield peer
    peer.close()


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_who_is_not_let_in_is_told_so(tierkv: Run, refusing: Peer, command: list[str]) -> None:
    code, out, err = tierkv(*command, "--socket", refusing.path)
    assert (code, out) == (1, "")
    assert err == "tierkv: user 5 may not use this daemon\n"
