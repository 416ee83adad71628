"""The status page for a person: one file without any other, and the policy that it is held to."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).parent / "assets" / "status.html"


class StatusPage(NamedTuple):
    """``policy`` is its Content-Security-Policy: this script, this style, this origin, no more."""

    body: bytes
    policy: str


def load_status_page() -> StatusPage:
    """Read the page that is installed with tierkv. Raises OSError."""
    text = _FILE.read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash_of('script', text)}; "
        f"style-src {_hash_of('style', text)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return StatusPage(text.encode(), policy)


def _hash_of(element: str, text: str) -> str:
    """What allows this one inline element, and no other that might get into the page."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
