"""A result for people: the section "Attention" of docs/BENCHMARKS.md."""

from __future__ import annotations

from tierkv.bench.docs import filled, text
from tierkv.bench.report import Document

BEGIN = "<!-- made by python -m benchmarks.attention --docs FILE -->"
END = "<!-- end of what benchmarks.attention made -->"


def replaced(page: str, found: Document) -> str:
    """The page with this run in the place of the last one. Raises ValueError without marks."""
    return filled(page, BEGIN, END, f"{text(found)}\n")
