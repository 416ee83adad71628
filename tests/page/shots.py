"""Pictures of the status page, to look at: ``python -m tests.page.shots FOLDER``.

Those of docs/ are made by ``python -m tests.page.shots docs light dark``, at the repository's root.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.page.chromium import Chromium
from tests.page.documents import busy, degraded, past, recovering, showing
from tierkv.obs.status import StatusDocument

SHOTS = {
    "light": (busy(), 1180, False),
    "dark": (busy(), 1180, True),
    "phone": (busy(), 360, False),
    "phone-dark": (degraded(), 360, True),
    "recovering": (recovering(), 1180, False),
    "degraded": (degraded(), 1180, False),
    "new": (StatusDocument(version="0.1.0", state="serving", pid=1, uptime_s=4.0), 1180, False),
}


def main(folder: Path, *names: str) -> None:
    """Write those that are named, or all."""
    with Chromium() as browser, showing(busy(), past()) as shown:
        for name in names or SHOTS:
            document, width, dark = SHOTS[name]
            shown.document = document
            page = browser.page(width, dark=dark)
            page.goto(shown.url)
            page.until("document.body.className !== 'waiting'")
            page.screenshot(folder / f"status-page-{name}.webp")
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
