"""Who is measured: what each peer is, what it promises, and what it takes to run it.

The one place for versions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Survives = Literal["nothing", "kill -9", "power loss"]


@dataclass(frozen=True)
class Environment:
    """Where a peer's client runs: a virtual environment made of these ``steps`` of pip install.

    No steps: the interpreter at hand. ``programs`` must be on PATH, from the Debian ``package``;
    ``libraries`` must be loadable.
    """

    name: str = ""
    steps: tuple[tuple[str, ...], ...] = ()
    programs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    package: str = ""
    checkout: bool = False


@dataclass(frozen=True)
class Peer:
    """One row. ``survives``: what an acknowledged put outlives, as the peer promises it.

    ``makes_room``: it evicts while it is put into; from others the suite removes what is old
    between the rounds, untimed.
    """

    name: str
    what: str
    driver: str
    survives: Survives
    environment: Environment = Environment()
    options: dict[str, Any] = field(default_factory=dict)
    makes_room: bool = False
    server: bool = True


CEILING = "copy"
OURS = "tierkv"

REDIS = Environment(
    "redis",
    (("numpy==2.4.6", "redis==8.1.0", "hiredis==3.5.0"),),
    ("redis-server",),
    (),
    "redis-server",
)
MEMCACHED = Environment(
    "memcached", (("numpy==2.4.6", "pymemcache==4.0.0"),), ("memcached",), (), "memcached"
)
MOONCAKE = Environment(
    "mooncake",
    (("numpy==2.4.6", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
    libraries=("libibverbs.so.1",),
    package="libibverbs1",
)
LMCACHE = Environment(
    # A torch for the CPU comes first, else LMCache's own dependencies bring one for CUDA.
    "lmcache",
    (("torch==2.13.0",), ("lmcache==0.5.6", "aiofiles==25.1.0", "aiofile==3.12.3")),
)
INFERA = Environment(
    "infera", (("numpy==2.4.6", "msgpack==1.2.4", "pyyaml==6.0.3"),), checkout=True
)

PEERS = (
    Peer(
        CEILING, "numpy copies within one process", "numpy_copy:NumpyCopy", "nothing", server=False
    ),
    Peer(
        OURS,
        "device tier, `wal.durability = kill`",
        "tierkv_worker:Tierkv",
        "kill -9",
        options={"durability": "kill"},
        makes_room=True,
    ),
    Peer(
        "tierkv-power",
        "the same with `power`, and a disk tier",
        "tierkv_worker:Tierkv",
        "power loss",
        options={"durability": "power"},
        makes_room=True,
    ),
    Peer(
        "lmcache-mp-shm",
        "multiprocess server, engine-driven, shared memory",
        "lmcache_mp:LmcacheMp",
        "nothing",
        LMCACHE,
        makes_room=True,
    ),
    Peer(
        "mooncake-shm",
        "master and client on this host, shared memory",
        "mooncake_shm:MooncakeShm",
        "nothing",
        MOONCAKE,
    ),
    Peer(
        "infera-kvd",
        "lease, copy, commit in its shared arena",
        "infera_kvd:InferaKvd",
        "nothing",
        INFERA,
        options={"long": False},
        makes_room=True,
    ),
    Peer(
        "infera-kvd-long",
        "the same with inline puts, retention long",
        "infera_kvd:InferaKvd",
        "power loss",
        INFERA,
        options={"long": True},
        makes_room=True,
    ),
    Peer(
        "redis",
        "Unix socket, hiredis",
        "redis_server:Redis",
        "nothing",
        REDIS,
        options={"appendfsync": ""},
    ),
    Peer(
        "redis-aof-always",
        "the same, append-only file synced always",
        "redis_server:Redis",
        "power loss",
        REDIS,
        options={"appendfsync": "always"},
    ),
    Peer("memcached", "Unix socket, pymemcache", "memcached:Memcached", "nothing", MEMCACHED),
    Peer(
        "lmdb-writemap",
        "`writemap=True, sync=False`, in the user's process",
        "lmdb_store:Lmdb",
        "kill -9",
        options={"writemap": True, "sync": False},
        server=False,
    ),
    Peer(
        "lmdb-nosync",
        "`sync=False`",
        "lmdb_store:Lmdb",
        "kill -9",
        options={"writemap": False, "sync": False},
        server=False,
    ),
    Peer(
        "lmdb",
        "as it comes: a sync a commit",
        "lmdb_store:Lmdb",
        "power loss",
        options={"writemap": False, "sync": True},
        server=False,
    ),
)
