"""``python -m tests.torture.blind serve ...``: a daemon that believes every payload it reads."""

from __future__ import annotations

import numpy as np

from tierkv.cli.main import main
from tierkv.core.ids import I64, Bool
from tierkv.tiers import copy, disk


def _believe(_entries: object, chosen: I64, _sums: object) -> Bool:
    return np.ones(len(chosen), np.bool_)


if __name__ == "__main__":
    copy.sums_agree = _believe
    disk.sums_agree = _believe
    main()
