"""``python -m tests.crash.mortal serve ...``: a daemon that dies of SIGUSR2 in its own way.

It kills itself right before its next write to the log, when everything that comes before the
write has been done and nothing after it: a moment that kills from outside hardly ever meet.
"""

from __future__ import annotations

import os
import signal

from tierkv_wal import WalWriter

from tierkv.cli.main import main


def _arm() -> None:
    write = WalWriter.write
    doomed = False

    def doom(_number: int, _frame: object) -> None:
        nonlocal doomed
        doomed = True

    def mortal_write(self: WalWriter) -> int:
        if doomed and self.appended_lsn > self.written_lsn:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self)

    WalWriter.write = mortal_write  # type: ignore[method-assign]  # that is the point
    signal.signal(signal.SIGUSR2, doom)


if __name__ == "__main__":
    _arm()
    main()
