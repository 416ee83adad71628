"""docs/PROTOCOL.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from tierkv import errors
from tierkv.core.spec import KVSpec
from tierkv.rpc import messages
from tierkv.rpc.wire import MAGIC, PAYLOAD_BYTES_MAX, encode

PAGE = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
ALL = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type)
    and issubclass(kind, messages.Message)
    and kind is not messages.Message
]


def section(tag):
    """The text under the heading of one message."""
    found = re.search(rf"^### `{tag}`\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    assert found, f"docs/PROTOCOL.md has no section for {tag}"
    return found.group(1)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_field_is_described_in_order(kind):
    text = section(kind.__struct_config__.tag)
    described = re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.M)
    assert [name for name, _ in described if name not in CODES] == list(kind.__struct_fields__)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_default_is_given(kind):
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section(kind.__struct_config__.tag), re.M))
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            shown = '""' if field.default in (b"", "") else str(field.default).lower()
            assert rows[field.name].endswith(f", {shown}"), field.name
        else:
            assert ", " not in rows[field.name], field.name


@pytest.mark.parametrize("kind", get_args(messages.Request), ids=lambda kind: kind.__name__)
def test_every_request_names_its_reply(kind):
    replies = {reply.__struct_config__.tag for reply in get_args(messages.Reply)}
    (named,) = re.findall(r"Reply:\s`(\w+)`", section(kind.__struct_config__.tag))
    assert named in replies


CODES = {cls.code for cls in errors._all_errors(errors.TierkvError)}


def test_every_error_code_that_travels_is_listed():
    local = {"unavailable", "invariant"}
    listed = set(re.findall(r"`(\w+)`", section("failure")))
    assert CODES - local <= listed


def test_every_spec_field_is_listed():
    for field in KVSpec.__struct_fields__:
        assert re.search(rf"\b{field}\b", section("open_namespace"))


def test_numbers_and_the_example():
    assert f"version {messages.PROTOCOL_VERSION}" in PAGE.splitlines()[0]
    assert f"| magic | 0x{MAGIC:X} |" in PAGE
    assert f"{PAYLOAD_BYTES_MAX:,}" in PAGE
    (example,) = re.findall(r"^    ([0-9a-f ]+)$", PAGE, re.M)
    assert bytes.fromhex(example) == bytes(encode(7, messages.Stat()))
