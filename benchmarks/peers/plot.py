"""A result as a picture: how near each peer comes to a plain copy, by verb and block size."""

from __future__ import annotations

from xml.sax.saxutils import escape

from benchmarks.peers.catalog import CEILING, OURS
from benchmarks.peers.document import Document
from benchmarks.peers.page import SIZES, VERBS, against, size_text
from tierkv.bench.report import speed_text

BAR, PANEL, GAP, LABELS, HEAD = 16, 150, 24, 130, 56
FULL = 1.0
"""A bar of a panel's width is as fast as a copy."""
OURS_COLOUR, SERVER_COLOUR, LIBRARY_COLOUR = "#c2410c", "#64748b", "#cbd5e1"


def plot(found: Document) -> str:
    """An SVG. A bar that is longer than its panel is cut: its number says how long it is."""
    rows = [row for row in found.rows if not row.not_run and row.name != CEILING]
    height = HEAD + BAR * len(rows)
    width = LABELS + len(SIZES) * (PANEL + GAP)
    size = f'width="{width}" height="{len(VERBS) * height + GAP}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for down, verb in enumerate(VERBS):
        top = down * height + HEAD
        title = f"{verb} of 64 blocks a call, in multiples of a numpy copy"
        parts.append(_text(8, top - 32, title, weight="bold", size=13))
        for at, row in enumerate(rows):
            weight = "bold" if row.name.startswith(OURS) else "normal"
            middle = top + at * BAR + 12
            parts.append(_text(LABELS - 6, middle, row.name, anchor="end", weight=weight))
        for across, blocks in enumerate(SIZES):
            left = LABELS + across * (PANEL + GAP)
            parts.append(_text(left, top - 8, size_text(blocks)))
            parts.append(
                f'<rect x="{left}" y="{top}" width="{PANEL}" height="{BAR * len(rows)}" '
                'fill="#f8fafc"/>'
            )
            for at, row in enumerate(rows):
                line = found.line(row.name, f"{verb}.{blocks}")
                if line is None:
                    continue
                speed = against(line, CEILING)
                length = PANEL * min(speed / FULL, 1)
                library = SERVER_COLOUR if row.server else LIBRARY_COLOUR
                colour = OURS_COLOUR if row.name.startswith(OURS) else library
                y = top + at * BAR
                parts.append(
                    f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}" '
                    f'fill="{colour}"/>'
                )
                inside = length > PANEL * 0.8
                parts.append(
                    _text(
                        left + length + (-4 if inside else 4),
                        y + 12,
                        speed_text(speed),
                        anchor="end" if inside else "start",
                    )
                )
    legend = "orange: tierkv; dark: servers; light: in the user's process"
    parts += [_text(8, len(VERBS) * height + 12, legend), "</svg>"]
    return "\n".join(parts) + "\n"


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 11,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{escape(words)}</text>'
    )
