"""Test support: a command on a real terminal, and what a person sees there."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from tests.service.running import environment, until

TMUX = shutil.which("tmux")


class Screen:
    """``tierkv ARGUMENTS`` in a terminal of its own; a context manager.

    When the command has ended, the screen says "ended" and its status.
    """

    def __init__(
        self, *arguments: str, size: tuple[int, int] = (120, 60), extra: Mapping[str, str] = {}
    ) -> None:
        self._server = f"tierkv-{uuid.uuid4().hex[:12]}"
        variables = environment(extra) | {"TERM": "tmux-256color"}
        command = shlex.join([sys.executable, "-m", "tierkv", *arguments])
        setting = " ".join(f"{name}={shlex.quote(text)}" for name, text in variables.items())
        self._shell = f"env -i {setting} {command}; echo ended $?; read forever"
        self._size = size

    def __enter__(self) -> Screen:
        width, height = map(str, self._size)
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", width, "-y", height, self._shell
        )  # fmt: skip
        return self

    def __exit__(self, *exc: object) -> None:
        self._tmux("kill-server")
        Path(f"/tmp/tmux-0/{self._server}").unlink(missing_ok=True)

    def text(self, *, colours: bool = False) -> str:
        """What is on the screen, with escape sequences for its colours if wanted."""
        return self._tmux("capture-pane", "-p", *(["-e"] if colours else []))

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def shows(self, *wanted: str) -> str:
        """Its text, once all of this is on it."""

        def found() -> str:
            text = self.text()
            return text if all(part in text for part in wanted) else ""

        return str(until(found, f"for {wanted} on the screen:\n{self.text()}"))

    def _tmux(self, *arguments: str) -> str:
        assert TMUX is not None
        done = subprocess.run(
            [TMUX, "-L", self._server, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout
