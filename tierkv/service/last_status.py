"""The status document as a file: what the daemon held when it was last seen alive.

Written after every checkpoint and at the end, for `tierkv status --last` and for post-mortems. It
is a note to people, not part of the store: nothing is ever recovered from it.
"""

from __future__ import annotations

import os
from pathlib import Path

import aiofiles
import aiofiles.os
import msgspec

from tierkv.obs.status import StatusDocument

NAME = "last-status.json"


async def write_last_status(state_dir: Path, document: StatusDocument) -> None:
    """Replace the file. Raises OSError.

    Crash: the old file or the new one, whole (not synced: it need not outlive a power loss).
    """
    draft = state_dir / f"{NAME}.tmp"
    async with aiofiles.open(draft, "wb") as file:
        await file.write(msgspec.json.format(msgspec.json.encode(document)))
    await aiofiles.os.replace(draft, state_dir / NAME)


def read_last_status(state_dir: Path) -> tuple[bytes, float]:
    """The file's JSON and when it was written (Unix seconds). Raises OSError."""
    path = state_dir / NAME
    return path.read_bytes(), os.stat(path).st_mtime
