"""The pages: links that lead somewhere, Python that compiles, an index that is complete."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {page for pattern in ("*.md", "docs/**/*.md", "*/*.md") for page in ROOT.glob(pattern)}
)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without code."""
    return re.sub(r"`[^`\n]*`", "``", _FENCED.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What headings are called in links: lower case, no punctuation, dashes for spaces."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        kept = [
            letter
            for letter in heading.lower()
            if letter in " -_" or unicodedata.category(letter)[0] in "LN"
        ]
        found.add("".join(kept).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name(page)} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_on_the_page_compiles(page: Path) -> None:
    for language, code in _FENCED.findall(page.read_text(encoding="utf-8")):
        signatures = ") -> " in code and "def " not in code
        if language == "python" and not signatures:
            compile(code, name(page), "exec")


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target in _LINK.findall(prose(index))}
    missing = {page.resolve() for page in PAGES if page.parent != ROOT} - named - {index.resolve()}
    assert not missing
