"""A result for people: the section "Against peers" of docs/BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.peers.catalog import CEILING, OURS
from benchmarks.peers.document import Crash, Document, Row
from tierkv.bench.docs import filled
from tierkv.bench.harness import Line
from tierkv.bench.report import number, speed_text

BEGIN = "<!-- made by python -m benchmarks.peers --docs FILE -->"
END = "<!-- end of what benchmarks.peers made -->"
VERBS = ("put", "get")
SIZES = ("64k", "256k", "1024k", "2048k")
LATENCIES = (
    ("get 64 KiB p50", "get1.64k.p50"),
    ("get 64 KiB p99", "get1.64k.p99"),
    ("get 1 MiB p50", "get1.1024k.p50"),
    ("get 1 MiB p99", "get1.1024k.p99"),
    ("put 64 KiB p50", "put1.64k"),
    ("put 1 MiB p50", "put1.1024k"),
)
EXISTS = (("64 keys a call", "exists.64"), ("1,024 keys a call", "exists.1024"))
CLEAR = 1.1
"""A peer is ahead if it is faster by more than this: the rest is noise."""


def text(found: Document) -> str:
    """The whole section, without its heading."""
    parts = [
        _run(found),
        _table(found, "Put and get of 64 blocks a call, in multiples of a numpy copy", _rates),
        _table(found, "One block a call, microseconds", _latencies),
        _table(found, "Is it there? Million keys a second", _exists),
        _table(found, "kill -9 right after the last acknowledgement, and a restart", _crash),
        _promises(found),
        _behind(found),
        _who(found),
    ]
    return "\n".join(parts)


def replaced(page: str, found: Document) -> str:
    """The page with this run in the place of the last one. Raises ValueError without marks."""
    return filled(page, BEGIN, END, text(found))


def _run(found: Document) -> str:
    machine = found.machine
    foreign = sorted(line.foreign_cores for line in found.lines)
    busy = f"{foreign[len(foreign) // 2]:.1f}" if foreign else "?"
    kind = "A quick run: its numbers mean nothing. " if found.quick else ""
    return (
        f"{kind}tierkv {found.tierkv}, {machine.cpus} CPUs of {machine.cpu}, {machine.system}, "
        f"Python {machine.python}, {machine.event_loop}, files on {machine.file_system}; client "
        f"and server on {found.placement}; medians of {found.rounds} rounds in rotating order. "
        f"Other processes kept {busy} CPUs busy meanwhile (median).\n"
    )


def _table(found: Document, title: str, columns: Callable[[Document, Row], dict[str, str]]) -> str:
    rows = [(row, columns(found, row)) for row in found.rows if not row.not_run]
    names = list(dict.fromkeys(name for _, cells in rows for name in cells))
    if not names:
        return ""
    lines = [f"**{title}**\n", _cells(["peer", *names]), _cells(["---"] * (len(names) + 1))]
    for row, cells in rows:
        name = f"**{row.name}**" if row.name.startswith(OURS) else row.name
        lines.append(_cells([name, *(cells.get(each, "") for each in names)]))
    return "\n".join(lines) + "\n"


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rates(found: Document, row: Row) -> dict[str, str]:
    cells = {}
    for verb in VERBS:
        for size in SIZES:
            line = found.line(row.name, f"{verb}.{size}")
            if line is not None:
                cells[f"{verb} {size_text(size)}"] = _of_copy(row, line)
    fill = found.line(row.name, "fill.1024k")
    if fill is not None:
        cells["first fill 1 MiB"] = _of_copy(row, fill)
    return cells


def _of_copy(row: Row, line: Line) -> str:
    if row.name == CEILING:
        return f"1 ({number(line.value)} GB/s)"
    return speed_text(against(line, CEILING))


def _latencies(found: Document, row: Row) -> dict[str, str]:
    lines = ((name, found.line(row.name, key)) for name, key in LATENCIES)
    return {name: number(line.value) for name, line in lines if line is not None}


def _exists(found: Document, row: Row) -> dict[str, str]:
    lines = ((name, found.line(row.name, key)) for name, key in EXISTS)
    return {name: number(line.value / 1e3) for name, line in lines if line is not None}


def _crash(found: Document, row: Row) -> dict[str, str]:
    crash = row.crash
    if crash is None:
        return {}
    return {
        "promised to survive": row.survives,
        "survived": _survived(crash),
        "wrong blocks": str(crash.wrong),
        "restart to first hit": "never" if crash.first_hit_s is None else _time(crash.first_hit_s),
    }


def _survived(crash: Crash) -> str:
    shares = sorted({round(100 * found / crash.blocks) for found in crash.found})
    return " to ".join(f"{share} %" for share in (shares[:1] + shares[1:][-1:]))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _promises(found: Document) -> str:
    """The best put of 1 MiB at each level of what it survives."""
    lines = ["**Put of 1 MiB by what an acknowledged put survives, GB/s**\n"]
    lines += [_cells(["survives", "peers, fastest first"]), _cells(["---", "---"])]
    for level in ("nothing", "kill -9", "power loss"):
        speeds = []
        for row in found.rows:
            line = found.line(row.name, "put.1024k")
            if line is not None and row.survives == level and row.name != CEILING:
                speeds.append((line.value, row.name))
        ranked = ", ".join(f"{name} {number(value)}" for value, name in sorted(speeds)[::-1])
        lines.append(_cells([level, ranked or "nobody"]))
    return "\n".join(lines) + "\n"


def _behind(found: Document) -> str:
    """Where tierkv is not the fastest, said plainly."""
    rows = {row.name: row for row in found.rows}
    behind = []
    measures = dict.fromkeys(
        line.name.partition(".")[2] for line in found.lines if line.name.startswith(f"{OURS}.")
    )
    for measure in measures:
        ahead = []
        for name in rows:
            line = found.line(name, measure)
            if line is None or name in (CEILING, OURS) or name.startswith(f"{OURS}-"):
                continue
            speed = against(line, OURS)
            if speed > CLEAR:
                star = "" if rows[name].server else r"\*"
                ahead.append((speed, f"{name}{star} {speed_text(speed)}x"))
        if ahead:
            names = ", ".join(words for _, words in sorted(ahead)[::-1])
            behind.append(f"- `{measure}`: {names}")
    if not behind:
        return "**Where tierkv is behind**: nowhere in this run.\n"
    begin = "**Where tierkv is behind**, and how many times faster who is"
    return "\n".join([f"{begin} (\\* no server: in the user's process):\n", *behind, ""])


def against(line: Line, name: str) -> float:
    """Its speed against that peer; 0 where it was held against no such one."""
    return next((one.speed for one in line.references if one.name == name), 0.0)


def _who(found: Document) -> str:
    lines = ["**Who**\n", _cells(["peer", "version", "what", "room"]), _cells(["---"] * 4)]
    for row in found.rows:
        version = f"not run: {row.not_run}" if row.not_run else row.version
        room = "evicts while put into" if row.makes_room else "made between rounds"
        cells = [row.name, version.replace("|", "\\|"), row.what, room]
        lines.append(_cells([" ".join(cell.split()) for cell in cells]))
    return "\n".join(lines) + "\n"


def size_text(label: str) -> str:
    """64k as people write it."""
    kib = int(label[:-1])
    return f"{kib >> 10} MiB" if kib >= 1024 else f"{kib} KiB"
