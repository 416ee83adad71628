"""On which line of a TOML text each key stands; ``tomllib`` does not say.

The text has already been accepted by ``tomllib``, so this only has to tell keys, brackets, strings
and comments apart.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

KeyPath = tuple[str, ...]

_TOKEN = re.compile(
    r'''
    """(?:\\.|[^\\])*?"""(?:"{0,2})      # basic string over several lines
  | \'\'\'.*?\'\'\'(?:'{0,2})            # literal string over several lines
  | "(?:\\.|[^"\\\n])*" | '[^'\n]*'      # strings
  | \#[^\n]*                             # comment
  | [\n\[\]{}=,.]
  | [^\s\[\]{}=,.\#"']+                  # bare key, number, date, true, false
    ''',
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    position = 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        if not match.group().startswith("#"):
            yield _Token(match.group(), line)


def _key_part(token: str) -> str:
    if token[0] in "\"'":
        return str(tomllib.loads(f"key = {token}")["key"])
    return token


def _read_key(tokens: Iterator[_Token], first: _Token, end: str) -> KeyPath:
    parts = [_key_part(first.text)]
    for token in tokens:
        if token.text == end:
            break
        if token.text != ".":
            parts.append(_key_part(token.text))
    return tuple(parts)


def _read_header(tokens: Iterator[_Token]) -> KeyPath:
    first = next(tokens)
    if first.text != "[":
        return _read_key(tokens, first, "]")
    path = _read_key(tokens, next(tokens), "]")
    next(tokens)  # the second "]" of an array of tables
    return path


def _skip_value(tokens: Iterator[_Token]) -> None:
    """To the end of the statement: the first line end outside brackets."""
    depth = 0
    for token in tokens:
        if token.text in ("[", "{"):
            depth += 1
        elif token.text in ("]", "}"):
            depth -= 1
        elif token.text == "\n" and depth == 0:
            return


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every table and key of a valid TOML text; the first one if repeated.

    Keys inside an inline table are not listed: they stand on the line of their table.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    tokens = _tokens(text)
    for token in tokens:
        if token.text == "\n":
            continue
        if token.text == "[":
            table = _read_header(tokens)
            lines.setdefault(table, token.line)
        else:
            key = table + _read_key(tokens, token, "=")
            lines.setdefault(key, token.line)
        _skip_value(tokens)
    return lines


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int:
    """The line of a key, else of the closest table around it."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)
