"""``tierkv config`` and the configuration that ``tierkv serve`` hands to the daemon."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tierkv.config import docs
from tierkv.config.schema import Config, settings

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that a stand-in daemon was run with; it ends with 5."""
    configs: list[Config] = []

    def run(config: Config, read: Callable[[], Config]) -> int:
        assert read() == config
        configs.append(config)
        return 5

    daemon = ModuleType("tierkv.service.daemon")
    daemon.run = run  # type: ignore[attr-defined]  # a module made for this test
    monkeypatch.setitem(sys.modules, "tierkv.service.daemon", daemon)
    return configs


def test_default_prints_the_example_file(tierkv: Run) -> None:
    assert tierkv("config", "default") == (0, docs.default_toml(), "")


def test_defaults_as_json(tierkv: Run) -> None:
    document = json.loads(tierkv("config", "default", "--json")[1])
    assert list(document) == list(settings())
    assert document["wal.durability"]["default"] == "kill"
    assert document["device.bytes"]["default"] == "auto"
    assert {tuple(one) for one in document.values()} == {("default", "live", "description")}


def test_check_as_json(tierkv: Run) -> None:
    Path("bad.toml").write_text("[attend]\nthread = 2\n")
    code, out, _ = tierkv("config", "check", "--json")
    assert (code, json.loads(out)) == (0, {"fine": True, "problem": ""})
    code, out, err = tierkv("config", "check", "--json", "--config", "bad.toml")
    assert (code, err) == (78, "")
    assert json.loads(out) == {
        "fine": False,
        "problem": "attend.thread: unknown key (bad.toml:2); did you mean attend.threads?",
    }


def test_check(tierkv: Run) -> None:
    Path("good.toml").write_text("[attend]\nthreads = 2\n")
    Path("bad.toml").write_text("[attend]\nthread = 2\n")
    assert tierkv("config", "check", "--config", "good.toml") == (
        0,
        "the configuration is fine\n",
        "",
    )
    assert tierkv("config", "check", "--config", "bad.toml") == (
        78,
        "",
        "tierkv: attend.thread: unknown key (bad.toml:2); did you mean attend.threads?\n",
    )


def test_show_tells_value_and_origin(tierkv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.toml").write_text('[server]\nstate_dir = "state"\n[host]\nbytes = "auto"\n')
    monkeypatch.setenv("TIERKV_LOG__LEVEL", "debug")
    code, out, _ = tierkv(
        "config", "show", "--config", "t.toml", "--set", "device.bytes=1MiB",
        "--set", "metrics.tcp=",
    )  # fmt: skip
    assert code == 0
    header, *rows = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    assert header == ["key", "value", "from", "on change"]
    found = {key: (value, origin) for key, value, origin, _ in rows}
    assert list(found) == list(settings())
    assert found["server.state_dir"] == (str(Path("state").resolve()), "t.toml:2")
    assert found["host.bytes"][1] == "t.toml:4: automatic"
    assert found["log.level"] == ("debug", "env TIERKV_LOG__LEVEL")
    assert found["metrics.tcp"] == ('""', "flag --set metrics.tcp")
    assert found["device.bytes"] == ("1 MiB", "flag --set device.bytes")
    assert found["disk.dir"] == (str(Path("state/data").resolve()), "default: automatic")
    on_change = {key: row[-1] for key, *row in rows}
    assert on_change["log.level"] == "reload"
    assert on_change["device.bytes"] == "restart"


def test_show_as_json(tierkv: Run) -> None:
    code, out, _ = tierkv("config", "show", "--json", "--set", "device.bytes=1MiB")
    document = json.loads(out)
    assert code == 0
    assert list(document) == list(settings())
    assert document["device.bytes"] == {
        "value": 1 << 20,
        "origin": "flag --set device.bytes",
        "live": False,
    }


def test_serve_hands_a_resolved_configuration_to_the_daemon(
    tierkv: Run, served: list[Config]
) -> None:
    code, _, err = tierkv(
        "serve", "--socket", "s.sock", "--state-dir", "state", "--device-bytes", "2 MiB",
        "--host-bytes", "0", "--disk-bytes", "1 MiB", "--durability", "none",
        "--set", "wal.checkpoint_s=1s", "--set", "device.bytes=1 MiB",
    )  # fmt: skip
    assert (code, err) == (5, "")
    (config,) = served
    assert config.server.socket == str(Path("s.sock").resolve())
    assert config.server.state_dir == str(Path("state").resolve())
    assert (config.device.bytes, config.host.bytes, config.disk.bytes) == (2 << 20, 0, 1 << 20)
    assert (config.wal.durability, config.wal.checkpoint_s) == ("none", 1.0)


def test_serve_does_not_start_with_a_bad_configuration(tierkv: Run, served: list[Config]) -> None:
    code, _, err = tierkv("serve", "--device-bytes", "lots")
    assert code == 78
    assert err.startswith("tierkv: device.bytes: 'lots' is not a byte size (flag --device-bytes);")
    assert served == []


def test_an_override_needs_a_value(tierkv: Run, served: list[Config]) -> None:
    code, _, err = tierkv("serve", "--set", "wal.durability")
    assert code == 2
    assert "'wal.durability' is not SECTION.KEY=VALUE; see `tierkv serve --help`" in err
    assert served == []


def test_serve_help_shows_flags_variables_and_defaults(tierkv: Run) -> None:
    _, out, _ = tierkv("serve", "--help")
    for setting in settings().values():
        if setting.flag:
            assert setting.flag in out
            assert setting.variable in out
