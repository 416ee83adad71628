"""Layers, origins and error messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tierkv.config.load import default_file, load
from tierkv.config.resolve import Environment, Space, this_environment
from tierkv.config.schema import AUTO, Config
from tierkv.errors import ConfigError
from tierkv.units import GiB, MiB

MakeEnvironment = Callable[..., Environment]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes tierkv.toml in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_text(text: str) -> Path:
        path = Path("tierkv.toml")
        path.write_text(text)
        return path

    return write_text


def failure(file: Path | None, environment: Environment, flags: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        load(file, environment, flags)
    return error.value.message


def test_without_any_source_all_is_default(make_environment: MakeEnvironment) -> None:
    loaded = load(None, make_environment(), {})
    assert loaded.written == Config()
    assert loaded.config.server.socket == "/run/tierkv/tierkv.sock"
    assert set(loaded.origins.values()) == {"default"}


def test_later_layers_win_and_every_value_knows_its_origin(
    write: Callable[[str], Path], make_environment: MakeEnvironment
) -> None:
    file = write('[wal]\ndurability = "power"\nsegment_bytes = "1 MiB"\ncheckpoint_s = "1min"\n')
    variables = {"TIERKV_WAL__SEGMENT_BYTES": "2 MiB", "TIERKV_WAL__CHECKPOINT_S": "2min"}
    flags = {"wal.checkpoint_s": "3min", "--socket": "/s", "log.level": "debug"}
    loaded = load(file, make_environment(variables=variables), flags)
    wal = loaded.config.wal
    assert (wal.durability, wal.segment_bytes, wal.checkpoint_s) == ("power", 2 * MiB, 180.0)
    assert loaded.origins["wal.durability"] == "tierkv.toml:2"
    assert loaded.origins["wal.segment_bytes"] == "env TIERKV_WAL__SEGMENT_BYTES"
    assert loaded.origins["wal.checkpoint_s"] == "flag --set wal.checkpoint_s"
    assert loaded.origins["server.socket"] == "flag --socket"
    assert loaded.origins["wal.none_flush_s"] == "default"


def test_values_of_every_kind(
    write: Callable[[str], Path], make_environment: MakeEnvironment
) -> None:
    file = write(
        "server = { allowed_uids = [0, 1000], grace_s = 2.5 }\n"
        "device.bytes = 1_048_576\n"
        'host.bytes = "auto"\n'
        "[disk]\nbytes = 0\nqueue_blocks = 7\n"
        '[metrics]\ntcp = ""\nsocket = ""\n'
    )
    config = load(file, make_environment(), {}).config
    assert config.server.allowed_uids == (0, 1000)
    assert config.server.grace_s == 2.5
    assert config.device.bytes == MiB
    assert config.host.bytes == 10 * GiB
    assert (config.disk.bytes, config.disk.queue_blocks) == (0, 7)
    assert (config.metrics.tcp, config.metrics.socket) == ("", "")


@pytest.mark.parametrize("uids", ["0, 1000", "[0, 1000]"])
def test_text_from_the_environment_is_read_like_the_file(
    make_environment: MakeEnvironment, uids: str
) -> None:
    variables = {
        "TIERKV_SERVER__ALLOWED_UIDS": uids,
        "TIERKV_SERVER__CONNECTIONS_MAX": "5",
        "TIERKV_DEVICE__BYTES": "",
        "TIERKV_METRICS__SOCKET": "auto",
    }
    loaded = load(None, make_environment(variables=variables), {})
    assert loaded.config.server.allowed_uids == (0, 1000)
    assert loaded.config.server.connections_max == 5
    assert loaded.config.device.bytes == 40 * GiB
    assert loaded.written.metrics.socket == AUTO


def test_other_variables_are_left_alone(make_environment: MakeEnvironment) -> None:
    load(None, make_environment(variables={"TIERKV_FAILPOINT": "x", "OTHER__THING": "y"}), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n\n[ram]\n\n# size\nbytez = 1",
            "ram.bytez: unknown key (tierkv.toml:6); did you mean device.bytes?",
        ),
        ("[wal]\ndurabilty = 1", "did you mean wal.durability?"),
        ("[server]\ndurability = 1", "did you mean wal.durability?"),
        ("[host]\nmap_byte = 1", "did you mean host.bytes?"),
        ("[log]\nmap_byte = 1", "did you mean index.map_bytes?"),
        ("socket = 'x'", "socket: not a section (tierkv.toml:1); did you mean server.socket?"),
        ("[servers]", "servers: not a section (tierkv.toml:1); did you mean [server]?"),
        ("server = 3", "server: not a section (tierkv.toml:1); did you mean [server]?"),
        ("[zebra]\nq = 1", "zebra.q: unknown key (tierkv.toml:2); `tierkv config default` lists"),
        (
            "[wal]\nsegment_bytes = '64M'",
            "wal.segment_bytes: '64M' has two readings (tierkv.toml:2); write 64 MiB (1024)",
        ),
        (
            "[wal]\nsegment_bytes = 1",
            "wal.segment_bytes: 1 is too small (tierkv.toml:2); write 64 KiB or more",
        ),
        ("[wal]\ncheckpoint_s = '5m'", "write 5min or 5ms"),
        ("[wal]\ncheckpoint_s = 0", "write 100ms or more"),
        ("[wal]\ndurability = 'sync'", "'sync' is not known (tierkv.toml:2); write one of kill,"),
        ("[wal]\ndurability = true", "True does not fit (tierkv.toml:2); write text"),
        ("[attend]\nthreads = 0", "attend.threads: 0 is too small (tierkv.toml:2); write 1 or"),
        ("[attend]\nthreads = true", "True does not fit (tierkv.toml:2); write a whole number"),
        ("[attend]\nthreads = '2.5'", "'2.5' does not fit"),
        ("[device]\nbytes = -1", "-1 is too small (tierkv.toml:2); write 0 B or more"),
        ("[device]\nbytes = 1.5", "1.5 does not fit (tierkv.toml:2); write a byte size"),
        ("[server]\nallowed_uids = [-1]", "[-1] does not fit (tierkv.toml:2); write user ids"),
        ("[server]\nallowed_uids = 'root'", "'root' does not fit"),
        ('[server]\nsocket = "/tmp/\\u0000"', "does not fit (tierkv.toml:2); write a path"),
        ("[server.socket]\nx = 1", "server.socket: {'x': 1} does not fit (tierkv.toml:1)"),
        ("[wal]\ncheckpoint_s = nan", "nan does not fit (tierkv.toml:2); write a duration"),
        ("[server]\ngrace_s = inf", "inf does not fit (tierkv.toml:2); write a duration"),
        ('[server]\nstate_dir = "a\\u0000"', "does not fit (tierkv.toml:2); write a path"),
        (f"[attend]\nthreads = '{'1' * 5000}'", "so many digits does not fit (tierkv.toml:2)"),
        (f"a = {'[' * 5000}", "recursion depth exceeded (tierkv.toml); correct the file's syntax"),
        ("[server\n", "(at line 1, column 8) (tierkv.toml); correct the file's syntax"),
    ],
)
def test_errors_say_what_where_and_what_to_do(
    text: str,
    message: str,
    write: Callable[[str], Path],
    make_environment: MakeEnvironment,
) -> None:
    assert message in failure(write(text), make_environment(), {})


def test_unknown_variables_and_flags_are_errors(make_environment: MakeEnvironment) -> None:
    environment = make_environment(variables={"TIERKV_SERVER__SOCKETT": "x"})
    assert (
        failure(None, environment, {}) == "server.sockett: unknown key (env TIERKV_SERVER__SOCKETT)"
        "; did you mean server.socket?"
    )
    assert (
        failure(None, make_environment(), {"wal.mode": "x"})
        == "wal.mode: unknown key (flag --set wal.mode); `tierkv config default` lists all keys"
    )


def test_all_problems_are_reported_at_once(
    write: Callable[[str], Path], make_environment: MakeEnvironment
) -> None:
    file = write("[wal]\nsegment_bytes = '1M'\n[attend]\nthreads = 0\n[x]\ny = 1\n")
    message = failure(file, make_environment(), {"log.level": "loud"})
    assert message.startswith("the configuration has 4 problems:\n  wal.segment_bytes: ")
    for origin in ("tierkv.toml:2", "tierkv.toml:4", "tierkv.toml:6", "flag --set log.level"):
        assert f"({origin});" in message


def test_a_file_that_cannot_be_read(tmp_path: Path, make_environment: MakeEnvironment) -> None:
    missing = tmp_path / "none.toml"
    assert "No such file or directory" in failure(missing, make_environment(), {})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "correct the file's syntax" in failure(binary, make_environment(), {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"device.bytes": "0"}, "device.bytes: 0 B leave no room for blocks"),
        ({"server.socket": "/" + "x" * 107}, "has 108 bytes, a socket's path at most 107"),
        (
            {"wal.durability": "power", "disk.bytes": "0"},
            "wal.durability: is power, but without a disk tier",
        ),
        ({"server.socket": "/run/metrics.sock"}, "metrics.socket: is server.socket as well"),
        ({"arena.dir": "/d", "disk.dir": "/d/"}, "arena.dir: is disk.dir as well"),
        ({"device.bytes": "128 GiB", "host.bytes": "1 GiB"}, "are 129 GiB together, but /dev/shm"),
        ({"disk.bytes": "2 TiB"}, "disk.bytes: 2.00 TiB do not fit: /var/lib/tierkv/data has 1000"),
        ({"metrics.tcp": "9464"}, "'9464' is not an address and a port (flag --set metrics.tcp)"),
        ({"metrics.tcp": "localhost:99999"}, "is not an address and a port"),
        ({"metrics.tcp": "0.0.0.0:9464"}, "would be open to other machines"),
        ({"metrics.tcp": "example:1"}, "write a loopback one, such as 127.0.0.1:9464"),
    ],
)
def test_rules_between_settings(
    flags: dict[str, str], message: str, make_environment: MakeEnvironment
) -> None:
    assert message in failure(None, make_environment(), flags)


@pytest.mark.parametrize("tcp", ["127.0.0.1:0", "[::1]:9464", "localhost:80", "127.1.2.3:1"])
def test_loopback_addresses(tcp: str, make_environment: MakeEnvironment) -> None:
    assert load(None, make_environment(), {"metrics.tcp": tcp}).config.metrics.tcp == tcp


def test_a_socket_path_of_107_bytes_is_fine(make_environment: MakeEnvironment) -> None:
    load(None, make_environment(), {"server.socket": "/" + "x" * 106})


def test_a_full_arena_does_not_stop_a_restart(make_environment: MakeEnvironment) -> None:
    environment = make_environment(ram=Space(10 * GiB, 0, 9 * GiB), ram_free_bytes=0)
    assert load(None, environment, {"device.bytes": "9 GiB", "host.bytes": "0"})


def test_what_this_user_may_not_look_into(
    tmp_path: Path, make_environment: MakeEnvironment
) -> None:
    shut = tmp_path / "shut"
    (shut / "tierkv").mkdir(parents=True)
    (shut / "tierkv" / "tierkv.toml").touch()
    for outer in (tmp_path, *list(tmp_path.parents)[:2]):
        outer.chmod(0o755)
    shut.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        environment = make_environment(uid=65534, variables={"XDG_CONFIG_HOME": str(shut)})
        assert default_file(environment) != shut / "tierkv" / "tierkv.toml"
        with pytest.raises(ConfigError, match="this user may not look there"):
            this_environment().space(str(shut / "state"))
    finally:
        if root:
            os.seteuid(0)
        shut.chmod(0o755)


def test_the_file_that_is_read_when_none_is_named(
    tmp_path: Path, make_environment: MakeEnvironment
) -> None:
    named = make_environment(variables={"TIERKV_CONFIG": "/x.toml"})
    assert default_file(named) == Path("/x.toml")
    own = tmp_path / ".config" / "tierkv" / "tierkv.toml"
    user = make_environment(uid=7, variables={"HOME": str(tmp_path)})
    assert default_file(user) != own
    own.parent.mkdir(parents=True)
    own.touch()
    assert default_file(user) == own
    root = make_environment(uid=0, variables={"HOME": str(tmp_path)})
    assert default_file(root) != own
