"""How far a recovery is, as people and programs are told."""

from __future__ import annotations

from tierkv.obs.status import ProgressStatus
from tierkv.service.progress import Progress


def test_the_time_of_a_step_begins_with_it() -> None:
    now_s = 10.0
    progress = Progress(lambda: now_s)
    assert progress.status() == ProgressStatus()
    progress.tell("reading the index", 0, 0)
    now_s = 12.0
    assert str(progress) == "reading the index"
    assert progress.status() == ProgressStatus(what="reading the index", elapsed_s=2.0)
    progress.tell("reading slot headers", 0, 4000)
    now_s = 13.0
    progress.tell("reading slot headers", 1000, 4000)
    assert str(progress) == "reading slot headers, 1,000 of 4,000"
    assert progress.status().elapsed_s == 1.0


def test_what_was_at_most_is_not_exceeded() -> None:
    progress = Progress()
    progress.tell("replaying the log", 11, 10)
    assert str(progress) == "replaying the log, 10 of 10"
