"""Test support: a headless Chromium, driven by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

WAIT_S = 20.0
"""Longest wait for something that must happen; only a failing test reaches it."""

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser")

_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it runs as root in CI, and only looks at pages of our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


class Chromium:
    """A browser of its own, with a profile that is removed; a context manager."""

    def __enter__(self) -> Chromium:
        assert EXECUTABLE is not None
        self._profile = tempfile.mkdtemp(prefix="tierkv-chromium-")
        # The browser reads commands from descriptor 3 and writes to 4; ours lie above both.
        theirs_in, ours_out = (_high(fd) for fd in os.pipe())
        ours_in, theirs_out = (_high(fd) for fd in os.pipe())

        def give_pipes() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._process = subprocess.Popen(
            [EXECUTABLE, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            preexec_fn=give_pipes,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._received = b""
        self._id = 0
        self._pages: dict[str, Page] = {}
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._out)  # it ends when nobody can command it any more
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def page(self, width: int = 1180, height: int = 900, *, dark: bool = False) -> Page:
        """A new tab of this size."""
        target = self.command("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.command("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"], target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.command(f"{domain}.enable")
        page.command(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        page.command("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        return page

    def command(
        self, method: str, params: dict[str, Any] | None = None, session: str = ""
    ) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile go to their pages."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._in], [], [], left)[0]:
                data = os.read(self._in, 1 << 20)
                assert data, f"the browser ended: {self._process.poll()}"
                self._received += data
        first, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.happened(message["method"], message["params"])
        return message


class Page:
    """One tab: what it asked for, and what it complained about."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.requests: list[str] = []
        self.errors: list[str] = []

    def command(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.command(method, params, self._session)

    def happened(self, method: str, params: dict[str, Any]) -> None:
        """Note an event."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def goto(self, url: str) -> None:
        self.command("Page.navigate", {"url": url})
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.command(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """The first true value of an expression; fails after a while."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"waited in vain for {script}: {self.errors}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """What an element says."""
        found = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return str(found)

    def screenshot(self, path: Path) -> None:
        """The whole page, however long, as .png or .webp."""
        params = {"format": path.suffix[1:], "quality": 82, "captureBeyondViewport": True}
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.command("Page.captureScreenshot", {**params, "clip": clip})
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        self._browser.command("Target.closeTarget", {"targetId": self._target})


def _high(fd: int) -> int:
    """The same pipe under a number that stands in nobody's way."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
