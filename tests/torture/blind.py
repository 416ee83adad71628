"""``python -m tests.torture.blind serve ...``: a daemon that believes every payload it reads."""

from __future__ import annotations

from tierkv.cli.main import main
from tierkv.tiers import copy, disk


def _believe(_entries: object, _index: int, _payload: object) -> bool:
    return True


if __name__ == "__main__":
    copy.sum_matches = _believe
    disk.sum_matches = _believe
    main()
