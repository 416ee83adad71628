"""Log lines on standard error: short text on a terminal, logfmt for journald, or JSON.

The daemon logs through the standard library: ``log.info("checkpoint done", extra={"lsn": 7})``.
Whatever stands in ``extra`` becomes a field of the line.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import msgspec

REPEATS_MAX = 10
"""Lines of the same call that are written within one period; the rest is only counted."""

REPEAT_PERIOD_S = 10.0

_HANDLER = "tierkv"
"""Name of the handler that ``setup`` makes, by which it finds the one that it made before."""

_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "suppressed"}
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}  # syslog(3)
_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31;1"}
_PLAIN_VALUE = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def setup(
    level: str = "info",
    line_format: str = "auto",
    *,
    stream: TextIO | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Send all log records of this process to ``stream`` (default: standard error).

    ``level`` and ``line_format`` are those of the [log] section. May be called again; handlers of
    others stay.
    """
    stream = stream or sys.stderr
    variables = os.environ if variables is None else variables
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(line_format, stream, variables))
    handler.addFilter(RepeatFilter())
    handler.set_name(_HANDLER)
    root = logging.getLogger()
    for earlier in [one for one in root.handlers if one.get_name() == _HANDLER]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(level.upper())


def _formatter(line_format: str, stream: TextIO, variables: Mapping[str, str]) -> logging.Formatter:
    under_journald = _is_journal(stream, variables)
    if line_format == "auto":
        line_format = "text" if stream.isatty() and not under_journald else "logfmt"
    if line_format == "json":
        return JsonFormatter()
    if line_format == "logfmt":
        return LogfmtFormatter(for_journald=under_journald)
    return TextFormatter(colour=stream.isatty() and not variables.get("NO_COLOR"))


def _is_journal(stream: TextIO, variables: Mapping[str, str]) -> bool:
    """Whether the stream is the one that journald reads (systemd.exec(5), $JOURNAL_STREAM)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False  # not a file at all
    return variables.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave as ``extra``, and how many lines like this were left out."""
    fields = {name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}
    if suppressed := getattr(record, "suppressed", 0):
        fields["suppressed"] = suppressed
    return fields


def _logfmt(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_logfmt_value(value)}" for name, value in fields.items())


def value_text(value: object) -> str:
    """The value of a field for a person: no more digits than mean something."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _logfmt_value(value: object) -> str:
    text = value_text(value)
    return text if _PLAIN_VALUE.fullmatch(text) else msgspec.json.encode(text).decode()


class TextFormatter(logging.Formatter):
    """``12:30:45 WARNING wal: slow sync took_s=1.2``, for a person at a terminal."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.rpartition(".")[2]
        line = f"{clock} {record.levelname} {name}: {record.getMessage()}"
        if fields := fields_of(record):
            line += f" {_logfmt(fields)}"
        if self._colour and (code := _COLOURS.get(record.levelname)):
            line = f"\x1b[{code}m{line}\x1b[0m"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


class LogfmtFormatter(logging.Formatter):
    """``level=warning logger=tierkv.wal msg="slow sync" took_s=1.2``, always on one line.

    For journald, which notes the time itself, a ``<4>`` in front carries the priority
    (sd-daemon(3)).
    """

    def __init__(self, *, for_journald: bool) -> None:
        super().__init__()
        self._for_journald = for_journald

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._for_journald:
            return f"<{_PRIORITIES.get(record.levelname, 6)}>{_logfmt(fields)}"
        return f"time={_utc(record)} {_logfmt(fields)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, msg, fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def _utc(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class RepeatFilter(logging.Filter):
    """Lets through the first lines of each logging call in a period and counts the others.

    The first line of the next period says how many were left out (``suppressed=37``). A call is
    known by its file and line, so there are only as many as the code has.
    """

    def __init__(
        self,
        repeats_max: int = REPEATS_MAX,
        period_s: float = REPEAT_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._repeats_max = repeats_max
        self._period_s = period_s
        self._clock = clock
        self._calls: dict[tuple[str, int], tuple[float, int]] = {}  # period's begin, lines so far

    def filter(self, record: logging.LogRecord) -> bool:
        call = (record.pathname, record.lineno)
        now_s = self._clock()
        begin_s, lines = self._calls.get(call, (now_s, 0))
        if now_s - begin_s >= self._period_s:
            record.suppressed = max(0, lines - self._repeats_max)
            begin_s, lines = now_s, 0
        self._calls[call] = (begin_s, lines + 1)
        return lines < self._repeats_max
