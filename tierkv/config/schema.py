"""Every setting: name, type, range, default and help, once.

The example file, docs/CONFIG.md, the environment variables and the flags all follow from this
module. A value that may be "auto" is ``AUTO`` (text) or ``AUTO_BYTES`` here and becomes concrete
in ``resolve``; the daemon only sees resolved configurations.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

from tierkv.units import GiB, KiB, MiB

AUTO = "auto"
"""A text setting that ``resolve`` decides."""

AUTO_BYTES = -1
"""A byte size that ``resolve`` decides."""

PrefaultSetting = Literal["auto", "on", "off"]


class Kind(Enum):
    """How a setting is written."""

    TEXT = auto()
    PATH = auto()
    COUNT = auto()
    BYTES = auto()
    DURATION = auto()
    UIDS = auto()


def _setting(
    kind: Kind,
    description: str,
    *,
    at_least: float | None = None,
    auto_is: str = "",
    off: bool = False,
    flag: str = "",
    live: bool = False,
) -> Meta:
    """What the loader and the documentation know of a setting.

    ``auto_is`` says what "auto" stands for (empty: it has no automatic value); ``off``: the empty
    text switches it off; ``flag``: the short flag of ``tierkv serve``; ``live``: a reload changes
    it, else a restart does.
    """
    extra = {"kind": kind, "auto_is": auto_is, "off": off, "flag": flag, "live": live}
    return Meta(description=description, ge=at_least, extra=extra)


def _text(description: str, *, off: bool = False, flag: str = "", live: bool = False) -> Meta:
    return _setting(Kind.TEXT, description, off=off, flag=flag, live=live)


def _path(description: str, auto_is: str, *, off: bool = False, flag: str = "") -> Meta:
    return _setting(Kind.PATH, description, auto_is=auto_is, off=off, flag=flag)


def _count(description: str, *, live: bool = False) -> Meta:
    return _setting(Kind.COUNT, description, at_least=1, live=live)


def _size(description: str, at_least: int, *, live: bool = False) -> Meta:
    return _setting(Kind.BYTES, description, at_least=at_least, live=live)


def _budget(description: str, auto_is: str, flag: str) -> Meta:
    return _setting(Kind.BYTES, description, at_least=AUTO_BYTES, auto_is=auto_is, flag=flag)


def _duration(description: str, at_least: float, *, live: bool = False) -> Meta:
    return _setting(Kind.DURATION, description, at_least=at_least, live=live)


class _Section(msgspec.Struct, frozen=True):
    pass


class Server(_Section, frozen=True):
    """The socket that workers connect to, and the limits of what they may ask."""

    socket: Annotated[
        str,
        _path(
            "Unix socket that workers connect to, at most 107 bytes.",
            "/run/tierkv/tierkv.sock for root, else $XDG_RUNTIME_DIR/tierkv/tierkv.sock, "
            "else tierkv.sock in the state directory",
            flag="--socket",
        ),
    ] = AUTO
    state_dir: Annotated[
        str,
        _path(
            "Directory of the log, the index and (unless [disk] says otherwise) the blocks.",
            "/var/lib/tierkv for root, else $XDG_STATE_HOME/tierkv, else ~/.local/state/tierkv",
            flag="--state-dir",
        ),
    ] = AUTO
    allowed_uids: Annotated[
        tuple[int, ...],
        _setting(
            Kind.UIDS,
            "User ids that may connect; none given leaves that to the socket's mode: 0660, so the "
            "daemon's user, its group and root.",
            live=True,
        ),
    ] = ()
    operator_uids: Annotated[
        tuple[int, ...],
        _setting(
            Kind.UIDS,
            "User ids that may change what a running daemon does (`tierkv reload`, `tierkv drain` "
            "and the like), beside root and the daemon's own user.",
            live=True,
        ),
    ] = ()
    grace_s: Annotated[
        float,
        _duration(
            "How long leases that outlived a daemon wait for their workers to return.", 0, live=True
        ),
    ] = 10.0
    connections_max: Annotated[int, _count("Connections at once.", live=True)] = 1024
    message_bytes_max: Annotated[
        int, _size("Largest message of a worker, from its next connection on.", 64 * KiB, live=True)
    ] = 16 * MiB
    in_flight_max: Annotated[
        int, _count("Unanswered requests of one connection, from the next one on.", live=True)
    ] = 256
    sequences_max: Annotated[int, _count("Open sequences of one lease.", live=True)] = 65_536
    blocks_per_request_max: Annotated[
        int,
        _count(
            "Blocks one request may name; 21845 are the most, as many as fit a frame of the log.",
            live=True,
        ),
    ] = 21_845


class Device(_Section, frozen=True):
    """The device tier: GPU memory, or the RAM arena that stands in for it."""

    bytes: Annotated[
        int,
        _budget(
            "Memory of the device tier. On a GPU it must be given: engines need memory, too.",
            "40 % of the free RAM, on the arena's file system if files keep it",
            "--device-bytes",
        ),
    ] = AUTO_BYTES
    kind: Annotated[
        Literal["cpu", "cuda"],
        _text(
            "Where the device tier lies: cpu = in RAM, cuda = in the memory of an NVIDIA GPU. It "
            "must be where the workers compute."
        ),
    ] = "cpu"
    index: Annotated[
        int,
        _setting(
            Kind.COUNT,
            "Which GPU, from 0, as CUDA numbers those that the daemon sees.",
            at_least=0,
        ),
    ] = 0


class Host(_Section, frozen=True):
    """The host tier: RAM behind the device tier."""

    bytes: Annotated[
        int,
        _budget(
            "Memory of the host tier; 0 = no host tier.",
            "10 % of the free RAM, on the arena's file system if files keep it",
            "--host-bytes",
        ),
    ] = AUTO_BYTES


class Arena(_Section, frozen=True):
    """The memory that holds the RAM tiers, so that their content outlives the daemon."""

    dir: Annotated[
        str,
        _path(
            "Directory of the arena files, on a RAM file system.",
            "/dev/shm/tierkv-HASH, where HASH follows from the state directory",
        ),
    ] = AUTO
    keep: Annotated[
        Literal["auto", "files", "manager"],
        _setting(
            Kind.TEXT,
            "Who keeps that memory while no daemon runs: files in arena.dir, or the service "
            "manager, which then must grant at least 4 stored descriptors "
            "(FileDescriptorStoreMax=).",
            auto_is="manager if $FDSTORE says that it grants them or it kept some already, "
            "else files",
        ),
    ] = "auto"
    prefault: Annotated[
        PrefaultSetting,
        _setting(
            Kind.TEXT,
            "Whether the daemon takes that memory ahead of need, in the background, or a page is "
            "taken when it is first written, which makes the first writes ten times slower.",
            auto_is="on if device.bytes or host.bytes says how much memory that is, else off",
        ),
    ] = "auto"
    numa: Annotated[
        str,
        _text(
            "NUMA nodes of that memory: interleave = all by turns, a node's number = that one "
            "while it has room, off = the node of whoever writes a page first, auto = interleave "
            "on a machine with several."
        ),
    ] = "auto"


class Disk(_Section, frozen=True):
    """The disk tier: segment files of fixed slots."""

    dir: Annotated[
        str, _path("Directory of the segment files.", "the directory data in the state directory")
    ] = AUTO
    bytes: Annotated[
        int,
        _budget(
            "Space of the disk tier; 0 = no disk tier.",
            "half of the free space of its file system, at most 64 GiB",
            "--disk-bytes",
        ),
    ] = AUTO_BYTES
    segment_bytes: Annotated[
        int, _size("Size of one segment file; a smaller disk.bytes lowers it.", 64 * KiB)
    ] = GiB
    write: Annotated[
        Literal["through", "demote"],
        _text("When blocks go to disk: as soon as they are sealed, or only when evicted from RAM."),
    ] = "through"
    io: Annotated[
        Literal["auto", "uring", "threads"],
        _text(
            "Who reads from disk: the kernel's io_uring, or a few threads; auto = io_uring where "
            "it is allowed."
        ),
    ] = "auto"
    direct: Annotated[
        Literal["auto", "on", "off"],
        _text(
            "Whether reads and writes go past the page cache (O_DIRECT); auto = where the file "
            "system can."
        ),
    ] = "auto"
    queue_blocks: Annotated[
        int,
        _count(
            "Blocks that may wait for the disk; beyond it optional copies are dropped.", live=True
        ),
    ] = 4096


class Wal(_Section, frozen=True):
    """The write-ahead log: what an acknowledged request survives."""

    durability: Annotated[
        Literal["kill", "none", "power"],
        _text(
            "What an acknowledged change survives: kill = the daemon's death (it is in the "
            "kernel before the reply), power = sealed blocks survive the machine's as well "
            "(fdatasync before the reply to a seal), none = neither (written every "
            "none_flush_s).",
            flag="--durability",
        ),
    ] = "kill"
    segment_bytes: Annotated[int, _size("Size of one log segment.", 64 * KiB)] = 64 * MiB
    checkpoint_bytes: Annotated[
        int,
        _size(
            "Log written since the last checkpoint that asks for a new one.", 64 * KiB, live=True
        ),
    ] = 64 * MiB
    checkpoint_s: Annotated[
        float, _duration("Longest time between two checkpoints.", 0.1, live=True)
    ] = 30.0
    none_flush_s: Annotated[
        float, _duration('How often the log is written with durability = "none".', 0.001)
    ] = 0.01


class Index(_Section, frozen=True):
    """The index of the disk tier (LMDB)."""

    map_bytes: Annotated[
        int, _size("Address space of the index; the file grows only as needed.", MiB)
    ] = 16 * GiB


class Recovery(_Section, frozen=True):
    """What a start does with what the last daemon left."""

    on_repeated_failure: Annotated[
        Literal["cold", "refuse"],
        _text(
            "After three starts in a row that died before they served, not told to: cold = move "
            "the log and the index into the quarantine and start with an empty cache, refuse = "
            "end with status 78, so that a person looks first."
        ),
    ] = "cold"


class Metrics(_Section, frozen=True):
    """Where the status page, /metrics, /healthz, /readyz and /status.json are served."""

    tcp: Annotated[str, _text("Loopback address and port; port 0 = any free one.", off=True)] = (
        "127.0.0.1:9464"
    )
    socket: Annotated[
        str,
        _path(
            "Unix socket with the same pages.", "metrics.sock beside the worker socket", off=True
        ),
    ] = AUTO


class Log(_Section, frozen=True):
    """The daemon's log, on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _text("Least severe level that is written.", live=True),
    ] = "info"
    format: Annotated[
        Literal["auto", "text", "logfmt", "json"],
        _text("Form of a line; auto = text on a terminal, logfmt elsewhere.", live=True),
    ] = "auto"
    slow_op_s: Annotated[
        float,
        _duration("A request that takes this long is logged with its phases.", 0, live=True),
    ] = 0.25


class Otel(_Section, frozen=True):
    """Spans for OpenTelemetry, of requests and their phases. Needs the extra ``otel``."""

    endpoint: Annotated[
        str,
        _text(
            "Where a collector takes traces by OTLP over HTTP: http://127.0.0.1:4318/v1/traces.",
            off=True,
        ),
    ] = ""
    sample_every: Annotated[
        int,
        _setting(
            Kind.COUNT,
            "One request of so many becomes a span, and every slow one (log.slow_op_s) does; "
            "0 = only those.",
            at_least=0,
        ),
    ] = 1000


class Attend(_Section, frozen=True):
    """Paged attention computed by the daemon for workers that ask for it."""

    threads: Annotated[int, _count("Threads that compute attention.")] = 1


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration; each field is a section of the file."""

    server: Server = Server()
    device: Device = Device()
    host: Host = Host()
    arena: Arena = Arena()
    disk: Disk = Disk()
    wal: Wal = Wal()
    index: Index = Index()
    recovery: Recovery = Recovery()
    metrics: Metrics = Metrics()
    log: Log = Log()
    otel: Otel = Otel()
    attend: Attend = Attend()


class Setting(NamedTuple):
    """One setting as the loader and the documentation see it."""

    section: str
    name: str
    kind: Kind
    description: str
    default: Any
    choices: tuple[str, ...]
    at_least: float | None
    auto_is: str
    off: bool
    flag: str
    live: bool

    @property
    def key(self) -> str:
        """Its name in messages and flags: "server.socket"."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """Its environment variable: "TIERKV_SERVER__SOCKET"."""
        return f"TIERKV_{self.section.upper()}__{self.name.upper()}"

    @property
    def auto(self) -> Any:
        """The value that stands for "auto"."""
        return AUTO_BYTES if self.kind is Kind.BYTES else AUTO


def section_types() -> dict[str, type[_Section]]:
    """The sections in file order, by name."""
    return {field.name: type(field.default) for field in msgspec.structs.fields(Config)}


def settings() -> dict[str, Setting]:
    """All settings in file order, by key ("server.socket")."""
    found = {}
    for section, struct in section_types().items():
        for field in msgspec.structs.fields(struct):
            value_type, meta = get_args(field.type)
            choices = get_args(value_type) if get_origin(value_type) is Literal else ()
            setting = Setting(
                section=section,
                name=field.name,
                description=meta.description,
                default=field.default,
                choices=choices,
                at_least=meta.ge,
                **meta.extra,
            )
            found[setting.key] = setting
    return found
