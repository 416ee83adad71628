"""Runs a script under strace with one fault put at one system call, and checks what it left.

``python -m tests.crash.sweeper`` imports everything once and then forks for every run: a run takes
some tenths of a second. It reads jobs from standard input and answers each by a line, both JSON.
``--prepare FOLDER DURABILITY`` makes the store that some scripts begin with.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tests.crash.daemon import SHM, START_S
from tests.crash.one_thread import DIE, STOP, serve
from tests.crash.script import (
    SCRIPTS,
    Acknowledged,
    Work,
    begun,
    checked,
    checked_and_used,
    config_of,
    prepared,
    work_on,
)
from tierkv.config.schema import Config
from tierkv.obs.log import setup
from tierkv.service.verify import verify

STORE_CALLS = (
    *("write", "pwrite64", "writev", "pwritev", "pwritev2"),
    *("fallocate", "ftruncate", "msync", "fsync", "fdatasync"),
    *("openat", "mkdir", "mkdirat", "rename", "renameat"),
    *("renameat2", "unlink", "unlinkat", "link", "linkat", "symlink"),
    *("truncate", "creat", "open", "rmdir"),
    *("sync_file_range", "syncfs", "sync", "copy_file_range", "sendfile", "splice"),
)
"""All calls by which a process may change files (memory that it shares aside)."""

ACKS = "/acks"
NOT_OF_THE_STORE = ("", ACKS, "/said", "/socket")

QUESTION = "sched_get_priority_max"
FAILED = 3
"""How a process of ours ends that saw something wrong. The daemon has no such exit code."""

ANSWER = 4242
"""What strace answers to a harmless question: from then on no call escapes it."""

ASK_S = 10.0

_CALL = re.compile(r"\d+ +(\w+)\(")
_NAMED = re.compile(r'"(/[^"]*)"')
_RESULT = re.compile(r"\) += (-?\d+)")
_OPEN_FILE = re.compile(r"\(\d+<(/[^>]*)>")


class Job(msgspec.Struct):
    """A run. ``call``, ``effect`` and ``when`` are strace's; without ``call`` nothing is injected.

    ``script`` names what runs; ``store`` is the folder of a store to copy, "" for none.
    ``may_lose``: what may have happened to what was acknowledged, "" for nothing; "blocks": some
    may be gone; "files": what is left may also be damaged and found to be. No byte that is served
    may ever be wrong.
    """

    script: str
    store: str
    durability: str = "kill"
    call: str = ""
    effect: str = ""
    when: int = 0
    may_lose: Literal["", "blocks", "files"] = ""


class Call(msgspec.Struct, frozen=True):
    """A system call: ``place`` is the path below the run's folder, "" for anything else.

    ``changes``: it may leave the store other than it was. ``returned``: its result, None if it
    was killed.
    """

    name: str
    place: str
    changes: bool
    returned: int | None


class Result(msgspec.Struct):
    """``ended``: exit code, or minus a signal. ``calls``: all of ``STORE_CALLS`` that were made,
    the one at which it was killed included. ``said``: the daemon's log. ``problems``: what was
    wrong afterwards.
    """

    ended: int
    calls: list[Call]
    said: str
    problems: list[str]


def run(job: Job) -> Result:
    """Do it in a folder of its own, which is gone afterwards."""
    with _folder() as folder:
        if job.store:
            copy = ["cp", "--recursive", "--sparse=always", f"{job.store}/.", str(folder)]
            subprocess.run(copy, check=True)
        said = folder / "said"
        run = _Run(config_of(folder, job.durability), folder, said)
        run.start(SCRIPTS[job.script], STOP, under_strace=True)
        calls = run.traced(job)
        problems = run.end() + _check(folder, job)
        return Result(run.ended, calls, said.read_text(), problems)


def prepare(store: Path, durability: str) -> None:
    """Make the store that the script "restart" begins with."""
    run = _Run(config_of(store, durability), store, store / "said")
    run.start(prepared, DIE)
    problems = run.end()
    if problems or run.ended != -signal.SIGKILL:
        raise RuntimeError(f"the store was not made: {run.ended}, {run.said.read_text()}")
    if durability == "none":
        Acknowledged.forget_unflushed(store / "acks")


def _check(folder: Path, job: Job) -> list[str]:
    """What is wrong with a store after a daemon's death. The store is used up by it."""
    config = config_of(folder, job.durability)
    told = Acknowledged.read(folder / "acks")
    # With durability "none" the last moments may be lost, and the device tier with them.
    sealed = told.flushed if job.durability == "none" else told.sealed
    owed: list[dict[int, int]] = [{}, {}] if job.may_lose else [sealed, told.flushed]
    problems = [] if job.may_lose == "files" else _findings(config)
    loses_index = job.script == "operators"  # what was deleted must not come back by that
    left = set() if loses_index else told.pinned
    starts = [
        ("with RAM", checked(owed[0], told.deleted, told.pinned), DIE, -signal.SIGKILL),
        ("without RAM", checked_and_used(owed[1], told.deleted, left), STOP, 0),
    ]
    for name, work, end, wanted in starts:
        run = _Run(config, folder, folder / f"checked {name}")
        run.start(work, end)
        problems += [f"a start {name}: {problem}" for problem in run.end()]
        if run.ended != wanted:
            problems.append(f"a start {name} ended by {run.ended}: {run.said.read_text()}")
        shutil.rmtree(config.arena.dir, ignore_errors=True)
        if loses_index:
            shutil.rmtree(folder / "state" / "index")
            loses_index = False
    if job.may_lose != "files":
        kept = [] if job.script == "operators" else os.listdir(folder / "state" / "quarantine")
        problems += [f"set aside: {name}" for name in kept]
        problems += _findings(config)
    return problems


def _findings(config: Config) -> list[str]:
    return [f"verify: {finding}" for finding in verify(config, deep=True).findings]


# --- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tierkv-crash-", dir=SHM if SHM.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _forked(job: Callable[[], int], said: Path) -> int:
    """A child that does the job, its output in a file; returns its pid."""
    sys.stdout.flush()
    # Opened here: the child must make no call that counts before strace is there.
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid:
        os.close(output)
        return pid
    code = FAILED
    try:
        for stream in (1, 2):
            os.dup2(output, stream)
        code = job()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int:
    """How a child ended: its exit code, or minus a signal. One that hangs is killed."""
    deadline = time.monotonic() + START_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            return -signal.SIGALRM
        time.sleep(0.001)


class _Run:
    """A daemon and its worker, each in a process. ``ended``: how the daemon ended."""

    def __init__(self, config: Config, folder: Path, said: Path) -> None:
        self.said = said
        self.ended = 0
        self._config = config
        self._folder = folder
        self._daemon = self._worker = 0

    def start(self, work: Work, end: bytes, *, under_strace: bool = False) -> None:
        """Fork both. ``end`` is what the worker says at the end: STOP or DIE."""
        ours, theirs = socket.socketpair()

        def daemon() -> int:
            theirs.close()
            if under_strace:
                _wait_for_strace()
            return serve(self._config, ours)

        def worker() -> int:
            ours.close()
            return work_on(self._config, theirs, self._folder / "acks", work, end)

        with ours, theirs:
            self._daemon = _forked(daemon, self.said)
            self._worker = _forked(worker, self.said)

    def traced(self, job: Job) -> list[Call]:
        """Put the daemon under strace, with the job's fault; returns the calls it made."""
        lines = self._folder / "traced"
        # A name that this kernel or strace does not know is no error after a question mark.
        names = ",".join(f"?{name}" for name in [*STORE_CALLS, QUESTION])
        command = ["strace", "-f", "-qq", "-y", "-s", "0", "-o", str(lines)]
        command += ["-p", str(self._daemon), "-e", f"trace={names}", "-e", "signal=none"]
        command += ["-e", f"inject={QUESTION}:retval={ANSWER}"]
        if job.call:
            command += ["-e", f"inject={job.call}:{job.effect}:when={job.when}"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL):
            self.ended = _ended(self._daemon)
        daemon, self._daemon = self._daemon, 0
        return _calls(lines.read_text(), daemon, self._folder)

    def end(self) -> list[str]:
        """Wait for both; what the worker saw that was wrong."""
        if self._daemon:
            self.ended = _ended(self._daemon)
        return [self.said.read_text()] if _ended(self._worker) else []


def _wait_for_strace() -> None:
    deadline = time.monotonic() + ASK_S
    while os.sched_get_priority_max(os.SCHED_OTHER) != ANSWER:
        if time.monotonic() > deadline:
            raise TimeoutError("strace does not come")
        time.sleep(0.001)


def _calls(text: str, pid: int, folder: Path) -> list[Call]:
    """The calls in strace's output, the question left out."""
    calls = []
    for line in text.splitlines():
        match = _CALL.match(line)
        if match is None or match[1] == QUESTION:
            continue
        if not line.startswith(f"{pid} "):
            raise RuntimeError(f"another thread or process made a call: {line}")
        path = _NAMED.search(line) or _OPEN_FILE.search(line)
        place = path[1] if path else ""
        inside = place.startswith(str(folder))
        only_opens = match[1] == "openat" and not re.search("O_CREAT|O_TRUNC", line)
        result = _RESULT.search(line)
        returned = int(result[1]) if result else None
        place = place.removeprefix(str(folder)) if inside else ""
        place = re.sub("/#[0-9]+$", "/#", place)  # a file without a name: another number each time
        changes = place not in NOT_OF_THE_STORE and not only_opens and returned != -1
        calls.append(Call(match[1], place, changes, returned))
    return calls


def _import_everything() -> None:
    """What is imported late shall be imported now, and not under strace."""
    with _folder() as folder:
        config = config_of(folder, "kill")
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = _forked(
                lambda: work_on(config, theirs, folder / "acks", begun, STOP), folder / "w"
            )
            if serve(config, ours) or _ended(pid):
                raise RuntimeError((folder / "w").read_text())
        # An existing store takes other ways than a new one.
        _findings(config)


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["--prepare"]:
        prepare(Path(sys.argv[2]), sys.argv[3])
        return
    setup("info", "logfmt")
    _import_everything()
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        sys.stdout.buffer.write(msgspec.json.encode(run(job)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
