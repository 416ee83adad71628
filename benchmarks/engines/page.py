"""A result for people: the section "Engines" of docs/BENCHMARKS.md."""

from __future__ import annotations

from statistics import median

from benchmarks.engines.document import (
    BOTH_KILLED,
    EMPTY,
    ENGINE_KILLED,
    Crash,
    Document,
    Pair,
    Row,
    Served,
)
from benchmarks.engines.stores import Tierkv
from tierkv.bench.docs import filled
from tierkv.bench.report import number
from tierkv.core.docs import table

BEGIN = "<!-- made by python -m benchmarks.engines --docs FILE -->"
END = "<!-- end of what benchmarks.engines made -->"

GAINS = {512: 10.0, 2048: 30.0, 4096: 40.0}
"""What tierkv has to reach by prompt length, with another engine on the same store."""

OVERHEAD = 0.02
STALL_S = 0.1
RETURN_S = 1.0
NONE = "none"


def replaced(page: str, found: Document) -> str:
    """The page with this run in the place of the last one. Raises ValueError without marks."""
    return filled(page, BEGIN, END, text(found))


def line(found: Row | Crash | Served) -> str:
    """What was measured just now, for who watches."""
    if isinstance(found, Served):
        return (
            f"{found.store} {found.state}: server, TTFT mean {found.mean_ttft_ms:.0f} ms, "
            f"median {found.median_ttft_ms:.0f} ms, {found.completed} answered, {found.failed} not"
        )
    if isinstance(found, Crash):
        returns = "never" if found.returns_s is None else f"{found.returns_s:.2f} s"
        return (
            f"{found.store}: killed for {found.away_s:.1f} s: hit {_ms(median(found.hit_s))}, "
            f"worst without a store {_ms(max(found.plain_s))}, worst {_ms(found.worst_s)}, "
            f"stall {_ms(found.stall_s)}, hits return after {returns}, {_same(found.same)}"
        )
    return (
        f"{found.store} {found.state} {found.tokens}: plain {_ttft(found, plain=True)}, "
        f"own {_ttft(found)}, {_cached(found)} cached, gain {number(found.gain)}x "
        f"(CPU {number(found.cpu_gain)}x), overhead {overhead(found):+.1%} "
        f"(CPU {cpu_overhead(found):+.1%}), {_same(all(pair.same for pair in found.pairs))}"
    )


def text(found: Document) -> str:
    """The whole section, without its heading."""
    parts = [_run(found), _overhead(found), _warm(found), _crashes(found), _served(found)]
    return "\n".join(part for part in parts if part)


def overhead(row: Row) -> float:
    """How much longer the first token takes than without a store, by the wall clock; a share."""
    return row.median(lambda pair: pair.own_s / pair.plain_s) - 1


def cpu_overhead(row: Row) -> float:
    """The same in the engine's CPU time."""
    return row.median(lambda pair: pair.own_cpu_s / pair.plain_cpu_s) - 1


def _run(found: Document) -> str:
    machine = found.machine
    kind = "A quick run: its numbers mean nothing. " if found.quick else ""
    settings = "".join(f"\n- {name}: {text}" for name, text in found.stores.items())
    return (
        f"{kind}tierkv {found.tierkv}, {found.engine}; {machine.cpus} CPUs of {machine.cpu}, "
        f"{machine.system}, Python {machine.python}, files on {machine.file_system}. Stores:\n"
        f"{settings}\n"
    )


def _rows(found: Document, state: str) -> list[Row]:
    return [row for row in found.rows if row.state == state]


def _overhead(found: Document) -> str:
    rows = _rows(found, EMPTY)
    if not rows:
        return ""
    head = ("store", "tokens", "TTFT without", "TTFT with", "longer", "in CPU time", "")
    cells = []
    for row in rows:
        bar = ""
        if row.store == Tierkv.name:
            bar = _verdict(overhead(row) <= OVERHEAD, f"<= {OVERHEAD:.0%}")
        cells.append(
            (
                "none, again" if row.store == NONE else row.store,
                f"{row.tokens:,}",
                _ttft(row, plain=True),
                _ttft(row),
                f"{overhead(row):+.1%}",
                f"{cpu_overhead(row):+.1%}",
                "; ".join(filter(None, (bar, _tokens(row)))),
            )
        )
    title = "**Nothing hits: what a store costs**, two engines in turns; *none, again* is the noise"
    return f"{title}\n\n{table(head, cells)}"


def _warm(found: Document) -> str:
    rows = [*_rows(found, ENGINE_KILLED), *_rows(found, BOTH_KILLED)]
    if not rows:
        return ""
    head = ("killed with -9", "store", "tokens", "cached", "TTFT", "gain", "in CPU time", "")
    cells = []
    for row in sorted(rows, key=lambda row: (row.state != ENGINE_KILLED, row.tokens)):
        notes = []
        if row.store == Tierkv.name and row.tokens in GAINS and row.state == ENGINE_KILLED:
            bar = GAINS[row.tokens]
            notes.append(_verdict(row.gain >= bar, f">= {bar:.0f}x"))
        notes.append(_tokens(row))
        cells.append(
            (
                "the engine" if row.state == ENGINE_KILLED else "engine and store",
                row.store,
                f"{row.tokens:,}",
                _cached(row),
                _ttft(row),
                f"{number(row.gain)}x",
                f"{number(row.cpu_gain)}x",
                "; ".join(filter(None, notes)),
            )
        )
    title = "**The same prompts to an engine that was just started**, held against no store"
    return f"{title}\n\n{table(head, cells)}"


def _crashes(found: Document) -> str:
    if not found.crashes:
        return ""
    head = (
        "store",
        "a request that hits",
        "worst without a store",
        "worst",
        "stall",
        "hits are back",
        "",
    )
    cells = []
    for crash in found.crashes:
        notes = []
        if crash.store == Tierkv.name:
            notes.append(_verdict(crash.stall_s < STALL_S, f"stall < {_ms(STALL_S)}"))
            back = crash.returns_s is not None and crash.returns_s < RETURN_S
            notes.append(_verdict(back, f"back in < {RETURN_S:.0f} s"))
        if not crash.same:
            notes.append("**other tokens**")
        cells.append(
            (
                crash.store,
                _ms(median(crash.hit_s)),
                _ms(max(crash.plain_s)),
                "no answer" if crash.stuck_s else _ms(crash.worst_s),
                f"{'over ' if crash.stuck_s else ''}{_ms(crash.stall_s)}",
                "never" if crash.returns_s is None else _ms(crash.returns_s),
                "; ".join(notes),
            )
        )
    tokens = found.crashes[0].tokens
    title = (
        f"**kill -9 of the store under load**: requests of {tokens} tokens and 2 more, "
        "one after the other; *stall* is what the worst took beyond the worst without a store"
    )
    return f"{title}\n\n{table(head, cells)}"


def _served(found: Document) -> str:
    if not found.served:
        return ""
    head = ("store", "state", "TTFT mean", "median", "p99", "all requests", "failed")
    cells = [
        (
            each.store,
            each.state,
            f"{each.mean_ttft_ms:.0f} ms",
            f"{each.median_ttft_ms:.0f} ms",
            f"{each.p99_ttft_ms:.0f} ms",
            f"{each.duration_s:.1f} s",
            str(each.failed),
        )
        for each in found.served
    ]
    title = (
        "**vLLM's own server and `bench serve`**, `prefix_repetition`: 4 prefixes of 1,024 tokens"
    )
    return f"{title}, twice each\n\n{table(head, cells)}"


def _verdict(holds: bool, bar: str) -> str:
    return f"ok ({bar})" if holds else f"**below** ({bar})"


def _tokens(row: Row) -> str:
    wrong = sum(not pair.same for pair in row.pairs)
    return f"**{wrong} of {len(row.pairs)} answers are others**" if wrong else ""


def _same(same: bool) -> str:
    return "same tokens" if same else "OTHER TOKENS"


def _cached(row: Row) -> str:
    counts = sorted({pair.cached for pair in row.pairs})
    return " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))


def _ttft(row: Row, *, plain: bool = False) -> str:
    def seconds(pair: Pair) -> float:
        return pair.plain_s if plain else pair.own_s

    return _ms(row.median(seconds))


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
