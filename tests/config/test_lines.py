"""The line scan agrees with what a reader of the file sees."""

from __future__ import annotations

import tomllib

import pytest

from tierkv.config.lines import key_lines, line_of


def lines_of(text: str) -> dict[str, int]:
    tomllib.loads(text)
    return {".".join(path): line for path, line in key_lines(text).items()}


def test_tables_and_keys() -> None:
    assert lines_of(
        "# intro\n\n[server]\nsocket = 'a' # why\n\n  [wal]\n  durability='kill'\n"
    ) == {
        "server": 3,
        "server.socket": 4,
        "wal": 6,
        "wal.durability": 7,
    }


def test_dotted_and_quoted_keys() -> None:
    text = 'server.socket = 1\n"a.b" . \'c\' = 2\n[ x . "y" ]\nz = 3\n"q\\"uote" = 4\n'
    assert lines_of(text) == {
        "server.socket": 1,
        "a.b.c": 2,
        "x.y": 3,
        "x.y.z": 4,
        'x.y.q"uote': 5,
    }


def test_values_over_several_lines_hide_what_looks_like_a_key() -> None:
    text = (
        "a = [ # ]\n  1, [2, 3],\n  # b = 1\n  'c = 2',\n]\n"
        'd = """\ne = 1\n\\"""\n[f]\n"""\n'
        "g = '''\nh = 1\n'''\n"
        'i = """quotes at the end"""""\n'
        "j = 'x=[' # k = 1\n"
        "l = 2\n"
    )
    assert lines_of(text) == {"a": 1, "d": 6, "g": 11, "i": 14, "j": 15, "l": 16}


def test_arrays_of_tables_and_inline_tables() -> None:
    text = "[[a]]\nb = 1\n[[a]]\nb = 2\nc = { d = 1, e = [2] }\nf = 1979-05-27T07:32:00.5Z\n"
    assert lines_of(text) == {"a": 1, "a.b": 2, "a.c": 5, "a.f": 6}


def test_windows_line_ends_and_no_line_end() -> None:
    assert lines_of("a = 1\r\n\r\nb = 2") == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("path", "line"), [(("a", "b"), 2), (("a", "c", "d"), 3), (("a", "x"), 1), (("y",), 1)]
)
def test_unlisted_keys_are_on_the_line_of_their_table(path: tuple[str, ...], line: int) -> None:
    assert line_of(key_lines("[a]\nb = 1\nc = { d = 1 }\n"), path) == line
