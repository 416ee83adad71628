"""``python -m tests.crash.unlucky serve ...``: a daemon whose bad luck under fiu-run has a seed.

TIERKV_CRASH_SEED is the seed. Threads share the luck, so that a seed gives the same kind of run
again rather than the very same one.
"""

from __future__ import annotations

import ctypes
import os

from tierkv.cli.main import main

if __name__ == "__main__":
    ctypes.CDLL("libfiu.so.0").fiu_set_prng_seed(int(os.environ["TIERKV_CRASH_SEED"]))
    main()
