"""docs/ARCHITECTURE.md says what the code does."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from tierkv.config.schema import Wal, settings
from tierkv.core.ids import Tier
from tierkv.rpc.messages import Request
from tierkv.service import docs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / docs.MARKDOWN_PATH).read_text(encoding="utf-8")
PROSE = re.sub(r"<!-- made: .*?<!-- end -->", "", PAGE, flags=re.DOTALL)
AGAIN = "run `python -m tierkv.service.docs`"


def section(title: str) -> str:
    found = re.search(rf"^## \d+\. {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, heads and rulers too."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def test_the_made_parts_are_up_to_date() -> None:
    assert docs.fill(PAGE, ROOT) == PAGE, AGAIN


def test_filling_mends_a_stale_part_and_refuses_an_unknown_one() -> None:
    stale = re.sub(r"(<!-- made: states -->\n).*?(<!-- end -->)", r"\1old\n\2", PAGE, flags=re.S)
    assert stale != PAGE
    assert docs.fill(stale, ROOT) == PAGE
    with pytest.raises(KeyError):
        docs.fill("<!-- made: nonsense -->\n<!-- end -->", ROOT)


def test_every_module_is_named_and_says_what_it_is_for() -> None:
    layout = section("Every module")
    for package in docs.PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "__init__.py":
                continue
            folder = path.parent.relative_to(ROOT).as_posix()
            part = layout.split(f"**`{folder}/`**", 1)[1].split("\n**", 1)[0]
            said = dict(rows(part))
            assert said[f"`{path.name}`"], path


def test_each_package_needs_what_the_table_says() -> None:
    table = rows(section("Who may import whom").split("Beside the packages")[0])[2:]
    assert len(table) == 14
    for package, _, needs in table:
        own = package.strip("`")
        assert _needs(own) == set(re.findall(r"`(\w+)`", needs)), own


def _needs(package: str) -> set[str]:
    """Packages of tierkv that a package imports, by statement or by name at run time."""
    home = {"tierkv_wal": "wal/", "tierkv_kernels": "kernels/"}.get(package, "")
    modules: set[str] = set()
    for path in (ROOT / (home + package.replace(".", "/"))).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                modules |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    found = set()
    for first, *rest in (module.split(".") for module in modules):
        if first in ("tierkv_wal", "tierkv_kernels"):
            found.add(first)
        elif first == "tierkv" and rest and (ROOT / "tierkv" / rest[0]).is_dir():
            found.add(rest[0])
    return found - {package.removeprefix("tierkv.")}


def test_every_verb_is_said_to_be_idempotent() -> None:
    named = {
        verb
        for row in rows(section("Leases and reconnecting"))
        for verb in re.findall(r"`(\w+)`", row[0])
    }
    assert named == {str(kind.__struct_config__.tag) for kind in get_args(Request)}


def test_every_durability_and_tier_has_its_row() -> None:
    durability = section("What is written when")
    modes = {row[0].split("`")[1] for row in rows(durability)[2:]}
    assert modes == set(settings()["wal.durability"].choices)
    assert f"`{Wal().durability}` (default)" in durability
    tiers = [row[0] for row in rows(section("Tiers, and how a copy moves"))[2:]]
    assert tiers[: len(Tier)] == [tier.label for tier in Tier]


def test_every_word_that_matters_is_explained() -> None:
    wanted = """block, chain hash, namespace, slot, pool, tier, sequence, lease, move, record,
        frame, segment, checkpoint, epoch, arena, entry, flow, effect, row, copy, sealed, indexed,
        twin, slot table, index"""
    explained = {row[0] for row in rows(section("Words"))}
    assert {word.strip() for word in wanted.split(",")} <= explained


def test_settings_on_the_page_exist() -> None:
    known = settings()
    areas = {key.split(".")[0] for key in known}
    found = re.findall(r"`(\w+)\.([a-z_]+)(?: = [^`]*)?`", PROSE)
    keys = {f"{area}.{name}" for area, name in found if area in areas}
    files = {"device.arena", "device.table", "host.arena", "host.table"}
    assert keys - files <= set(known)
    assert len(keys - files) > 10


def test_names_of_the_code_on_the_page_exist() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tierkv").rglob("*.py"))
    for owner, name in re.findall(r"`(?:\w+\.)?([A-Z]\w+)\.(\w+)", PROSE):
        assert re.search(rf"\bclass {owner}\b", code), owner
        assert re.search(rf"\bdef {name}\b|self\.{name}\b", code), f"{owner}.{name}"
    for name in re.findall(r"`(_\w+)`", PROSE):
        assert re.search(rf"\bdef {name}\b|self\.{name}\b", code), name


def test_modules_and_files_on_the_page_exist() -> None:
    packages = {path.parent.name for path in (ROOT / "tierkv").glob("*/__init__.py")}
    for package, module in re.findall(r"`(?:tierkv\.)?(\w+)\.([a-z]\w*)(?:\.\w+)?[`(]", PROSE):
        if package in packages - {"config"}:
            assert (ROOT / "tierkv" / package / f"{module}.py").exists(), f"{package}.{module}"
    for path in re.findall(r"`((?:tests|wal|docs)/[\w/]+\.(?:py|md))`", PROSE):
        assert (ROOT / path).exists(), path


def test_the_examples_run() -> None:
    scope: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, str(docs.MARKDOWN_PATH), "exec"), scope)


def test_lines_are_not_too_long() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 120 and line[:1] != "|"] == []
