"""``python -m tests.crash.warm serve ...``: the daemon, with its imports made before it is wanted.

It waits for its standard input to end and is then ``tierkv serve ...``. Where a test restarts a
daemon many times, the next one gets ready while the one before it works.
"""

from __future__ import annotations

import sys

import tierkv.cli.serve
import tierkv.obs.log
import tierkv.service.daemon  # noqa: F401  # to have been imported is the point
from tierkv.cli.main import main

if __name__ == "__main__":
    sys.stdin.read()
    main()
