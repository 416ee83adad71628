"""What went wrong last: warnings and errors of the log, kept for the status document."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.obs.log import fields_of, value_text
from tierkv.obs.status import PROBLEMS_MAX, ProblemStatus


class Problems(logging.Handler):
    """Remembers warnings and errors, each logging call once, with its latest message.

    So a flood of one kind does not drive out the others. Of the kinds the latest are kept. Any
    thread may log; the logging module locks.
    """

    def __init__(self, problems_max: int = PROBLEMS_MAX) -> None:
        super().__init__(logging.WARNING)
        self._problems_max = problems_max
        self._calls: dict[tuple[str, int], ProblemStatus] = {}  # the latest last

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler. Mutates."""
        call = (record.pathname, record.lineno)
        before = self._calls.pop(call, None)
        fields = {name: value_text(value) for name, value in fields_of(record).items()}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            fields["exception"] = repr(error)
        self._calls[call] = ProblemStatus(
            time_s=record.created,
            level=record.levelname.lower(),
            logger=record.name,
            message=record.getMessage(),
            fields=fields,
            count=before.count + 1 if before is not None else 1,
        )
        if len(self._calls) > self._problems_max:
            del self._calls[next(iter(self._calls))]

    def latest(self) -> list[ProblemStatus]:
        """The problems, the latest first."""
        return list(self._calls.values())[::-1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile everything that tierkv and asyncio log is looked at.

        Not at the root, whose handlers are replaced when the log is set up anew.
        """
        loggers = [logging.getLogger(name) for name in ("tierkv", "asyncio")]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)
