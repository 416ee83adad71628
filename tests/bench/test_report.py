"""What a run leaves: the lines on the screen, and the document."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tierkv.bench import report
from tierkv.bench.bars import Reference, Verdict
from tierkv.bench.harness import Bench, Line

LINE = Line(
    name="put.64k",
    unit="GB/s",
    value=1.234,
    rounds=[1.0, 1.234, 1.5],
    references=[Reference("memcpy", 10.04, 0.123, 0.1, 0.2)],
    placement="same core",
    foreign_cores=0.5,
    note="evicting",
    bars=[Verdict(">= 0.75 of memcpy", 0.123, False), Verdict(">= 1 GB/s", 1.234, True)],
)


def some_document(tmp_path: Path) -> report.Document:
    bench = Bench(tmp_path, quick=True, rounds=3)
    document = report.document(report.describe_machine(tmp_path), bench)
    document.lines.append(LINE)
    return document


def test_a_line_for_people_names_value_ratio_reference_placement_and_noise() -> None:
    expected = (
        "put.64k 1.23 GB/s 0.12x memcpy (10.0) [same core, foreign 0.50] (evicting) "
        "below: 0.12 (>= 0.75 of memcpy) ok: 1.23 (>= 1 GB/s)"
    )

    assert " ".join(report.render(LINE).split()) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12346"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.012")],
)
def test_numbers_have_the_digits_that_matter(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_document_survives_a_round_trip(tmp_path: Path) -> None:
    found = some_document(tmp_path)

    assert report.from_json(report.to_json(found)) == found
    assert (found.quick, found.rounds) == (True, 3)


def test_a_document_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    plain = msgspec.to_builtins(some_document(tmp_path))
    plain["lines"][0]["sped"] = 1

    with pytest.raises(msgspec.ValidationError, match="sped"):
        report.from_json(msgspec.json.encode(plain))


def test_programs_may_rely_on_these_keys(tmp_path: Path) -> None:
    plain = msgspec.json.decode(report.to_json(some_document(tmp_path)))

    assert plain["version"] == 2
    assert list(plain) == ["version", "tierkv", "quick", "rounds", "machine", "lines"]
    assert plain["lines"][0]["bars"][0] == {
        "bar": ">= 0.75 of memcpy",
        "measured": 0.123,
        "holds": False,
    }


def test_no_path_of_this_machine_is_in_the_document(tmp_path: Path) -> None:
    text = msgspec.json.encode(some_document(tmp_path)).decode()

    assert str(tmp_path) not in text


def test_the_file_system_is_that_of_the_innermost_mount() -> None:
    mounts = (
        "dev / ext4 rw 0 0\nshm /dev/shm tmpfs rw 0 0\nd /a\\040b xfs rw 0 0\nd /a btrfs rw 0 0\n"
    )

    assert report.file_system(Path("/dev/shm/x"), mounts) == "tmpfs"
    assert report.file_system(Path("/a b/c"), mounts) == "xfs"
    assert report.file_system(Path("/other"), mounts) == "ext4"
