"""The parts of docs/ARCHITECTURE.md that are made from the code.

``python -m tierkv.service.docs`` run at the root of the repository writes them anew. The page is
written by hand; each part lies between ``<!-- made: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierkv_wal import FRAME_RECORDS_MAX

from tierkv.config.schema import settings
from tierkv.config.values import write_value
from tierkv.core import docs as core
from tierkv.core.docs import first_sentence, table
from tierkv.core.placement import MOVE_BLOCKS, MOVE_BYTES
from tierkv.rpc.listener import BACKLOG
from tierkv.service.attend_queue import ROUND_ROWS_MAX, TABLE_ENTRIES_MAX
from tierkv.service.checkpoint import DIRTY_ROWS_MAX
from tierkv.service.engine import JOBS_IN_FLIGHT
from tierkv.service.lifecycle import TRANSITIONS
from tierkv.service.sessions import SCRATCH_BYTES
from tierkv.tiers.arena import POOLS_MAX
from tierkv.units import format_bytes

MARKDOWN_PATH = Path("docs/ARCHITECTURE.md")
PACKAGES = ("tierkv", "wal/tierkv_wal", "kernels/tierkv_kernels")

_PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, root: Path) -> str:
    """The page with every made part as the code at ``root`` has it. Raises KeyError."""
    parts: dict[str, Callable[[], str]] = {
        "records": core.records,
        "effects": core.effects,
        "invariants": core.invariants,
        "states": states,
        "limits": limits,
        "imports": lambda: imports(root),
        "layout": lambda: layout(root),
    }
    return _PART.sub(lambda found: f"{found[1]}\n{parts[found[2]]()}\n{found[3]}", page)


def states() -> str:
    """The daemon's states and which may follow which."""
    return table(
        ("state", "may become"),
        [
            (f"`{state}`", ", ".join(f"`{one}`" for one in sorted(following)) or "(the end)")
            for state, following in TRANSITIONS.items()
        ],
    )


def limits() -> str:
    """Every bound of the daemon, and what happens at it."""
    return table(
        ("what", "bound", "at the bound"),
        [
            ("connections", _setting("server.connections_max"), "`limit_exceeded`, closed"),
            ("connections not accepted yet", str(BACKLOG), "`connect` waits"),
            (
                "unanswered requests of a connection",
                _setting("server.in_flight_max"),
                "the daemon stops reading that socket",
            ),
            ("bytes of one message", _setting("server.message_bytes_max"), "`protocol`, closed"),
            ("sequences of a lease", _setting("server.sequences_max"), "`limit_exceeded`"),
            ("blocks of a request", _setting("server.blocks_per_request_max"), "`limit_exceeded`"),
            ("namespaces, ever", "65535", "`limit_exceeded`"),
            ("pools (block geometries), ever", str(POOLS_MAX), "`limit_exceeded`"),
            (
                "query and result of one `attend`",
                format_bytes(SCRATCH_BYTES),
                "the client raises `limit_exceeded`",
            ),
            (
                "query rows of several `attend` computed together",
                str(ROUND_ROWS_MAX),
                "the rest waits for the next round; a longer one is computed alone",
            ),
            (
                "sequences of one `attend`, times the blocks of the longest",
                str(TABLE_ENTRIES_MAX),
                "`limit_exceeded`",
            ),
            ("blocks of one move", f"{MOVE_BLOCKS}, and {MOVE_BYTES >> 20} MiB", "several moves"),
            ("jobs at a lane, per thread", str(JOBS_IN_FLIGHT), "the flow waits"),
            (
                "blocks waiting for the disk",
                _setting("disk.queue_blocks"),
                "the optional copy is dropped and counted; a later `flush` or stop makes it",
            ),
            ("records of a log frame", str(FRAME_RECORDS_MAX), "another frame"),
            (
                "log since the last checkpoint",
                _setting("wal.checkpoint_bytes"),
                "a checkpoint",
            ),
            ("rows changed since the last checkpoint", str(DIRTY_ROWS_MAX), "a checkpoint"),
            ("time since the last checkpoint", _setting("wal.checkpoint_s"), "a checkpoint"),
            ("wait for a worker after a crash", _setting("server.grace_s"), "its sequences end"),
        ],
    )


def imports(root: Path) -> str:
    """The import rules that import-linter checks, from pyproject.toml."""
    with (root / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return table(("rule", "what is checked"), [(c["name"], _contract(c)) for c in contracts])


def layout(root: Path) -> str:
    """Every module of the packages with the first sentence of its docstring."""
    parts = []
    for package in PACKAGES:
        folders = sorted({path.parent for path in (root / package).rglob("*.py")})
        for folder in folders:
            name = folder.relative_to(root).as_posix()
            about = folder / "__init__.py"
            said = _said(about) if about.exists() else ""
            rows = [
                (f"`{path.name}`", _said(path))
                for path in sorted(folder.glob("*.py"))
                if path != about
            ]
            parts.append(f"**`{name}/`** {said}\n\n{table(('module', 'what'), rows)}")
    return "\n".join(parts)


def _setting(key: str) -> str:
    setting = settings()[key]
    return f"{write_value(setting, setting.default)} (`{key}`)"


def _contract(contract: dict[str, Any]) -> str:
    if contract["type"] == "layers":
        return "from above: " + "; ".join(f"`{layer}`" for layer in contract["layers"])
    if contract["type"] == "independence":
        return " and ".join(_names(contract["modules"])) + " do not import each other"
    forbidden = ", ".join(_names(contract["forbidden_modules"]))
    return f"no {forbidden} in {', '.join(_names(contract['source_modules']))}"


def _names(modules: list[str]) -> list[str]:
    return [f"`{module}`" for module in modules]


def _said(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return first_sentence(docstring or "")


if __name__ == "__main__":
    page = MARKDOWN_PATH.read_text(encoding="utf-8")
    MARKDOWN_PATH.write_text(fill(page, Path.cwd()), encoding="utf-8")
