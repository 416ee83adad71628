"""Adapters are told by their files, and the scheduler does not wait for these to be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.running import until
from tierkv.integrations.vllm.adapters import Adapters

PATIENT_S = 20.0


@dataclass(frozen=True)
class Request:
    """What vLLM's ``LoRARequest`` says."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "adapter"
    load_inplace: bool = False


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digests are remembered from elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    """Ended with the test."""
    adapters = Adapters()
    yield adapters
    adapters.close()


def files(folder: Path, weights: bytes, rank: int = 8) -> Path:
    """An adapter's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def test_an_adapter_is_its_files(adapters: Adapters, tmp_path: Path) -> None:
    """Wherever they lie; not its number, and not its name."""
    one = Request(str(files(tmp_path / "a", b"one")))
    same = Request(str(files(tmp_path / "b", b"one")), 2, "other")
    other = Request(str(files(tmp_path / "c", b"two")), 3)
    rank = Request(str(files(tmp_path / "d", b"one", rank=4)), 4)
    found = [adapters.fingerprint(asked, PATIENT_S) for asked in (one, same, other, rank)]
    assert None not in found
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_an_adapter_that_is_loaded_anew_is_read_anew(adapters: Adapters, tmp_path: Path) -> None:
    """When vLLM is told that its files have changed."""
    path = str(files(tmp_path / "a", b"one"))
    before = adapters.fingerprint(Request(path), PATIENT_S)
    files(tmp_path / "a", b"two")
    assert adapters.fingerprint(Request(path), PATIENT_S) == before, "it has the old ones loaded"
    assert adapters.fingerprint(Request(path, load_inplace=True), PATIENT_S) not in (before, None)


def test_files_that_are_not_here_tell_nothing(adapters: Adapters, tmp_path: Path) -> None:
    """Nor does a folder without weights."""
    assert adapters.fingerprint(Request(str(tmp_path / "absent")), PATIENT_S) is None
    (tmp_path / "empty").mkdir()
    assert adapters.fingerprint(Request(str(tmp_path / "empty"), 2), PATIENT_S) is None


def test_nobody_waits_for_large_files(adapters: Adapters, tmp_path: Path) -> None:
    """Until they are read nothing is known of them."""
    folder = files(tmp_path / "large", b"")
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    asked = Request(str(folder))
    assert adapters.fingerprint(asked, 0.0) is None
    until(lambda: adapters.fingerprint(asked, 0.0))
