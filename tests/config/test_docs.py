"""The generated files are what the schema says, and the example file really is the defaults."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tierkv.config import docs
from tierkv.config.load import load
from tierkv.config.resolve import Environment
from tierkv.config.schema import Config, section_types, settings

ROOT = Path(__file__).parents[2]
AGAIN = "run `python -m tierkv.config.docs`"


def test_example_file_is_up_to_date() -> None:
    assert (ROOT / docs.EXAMPLE_PATH).read_text(encoding="utf-8") == docs.default_toml(), AGAIN


def test_configuration_page_is_up_to_date() -> None:
    assert (ROOT / docs.MARKDOWN_PATH).read_text(encoding="utf-8") == docs.markdown(), AGAIN


def test_example_file_holds_all_defaults(
    tmp_path: Path, make_environment: Callable[..., Environment]
) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text(re.sub(r"(?m)^#(?=\w)", "", docs.default_toml()))
    loaded = load(file, make_environment(), {})
    assert loaded.written == Config()
    assert all(str(file) in origin for origin in loaded.origins.values())


def test_commented_example_file_sets_nothing(
    tmp_path: Path, make_environment: Callable[..., Environment]
) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text(docs.default_toml())
    assert set(load(file, make_environment(), {}).origins.values()) == {"default"}


def test_every_setting_and_section_says_what_it_is_for() -> None:
    for setting in settings().values():
        assert setting.description.endswith("."), setting.key
    for section, struct in section_types().items():
        assert (struct.__doc__ or "").endswith("."), section


def test_example_file_fits_a_terminal() -> None:
    assert max(map(len, docs.default_toml().splitlines())) <= 100
