"""A real browser for tests of the page: Chromium without a window, driven by its DevTools protocol over two pipes.

    with Browser() as browser:
        browser.open("http://127.0.0.1:8080/")
        browser.wait("document.querySelector('h1').textContent === 'Overview'")

No package is needed, and no port is opened: `--remote-debugging-pipe` has Chromium read commands from descriptor 3 and
write answers to descriptor 4, each a JSON text that ends in a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any, Final, Self

NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # in a container without user namespaces there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
ANSWER_S: Final = 150.0
_AS_3_AND_4: Final = """
import fcntl, os, sys
high = [fcntl.fcntl(int(given), fcntl.F_DUPFD, 10) for given in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Runs before Chromium in its process: the descriptors that were inherited become 3 and 4."""


def chromium() -> str | None:
    """The path of Chromium or Chrome on this machine; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class BrowserError(AssertionError):
    """The browser answered with an error, or did not answer; or a script of the page raised one."""


class Browser:
    """One page of a browser. One thread uses it."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        path = chromium()
        if path is None:
            raise BrowserError("no Chromium was found: apt-get install chromium")
        self._folder = tempfile.TemporaryDirectory(prefix="pxrs-browser-", ignore_cleanup_errors=True)
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, str(commands), str(answers), path, *flags],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        """What scripts of the page have raised, what they wrote to the console as errors, and what CSP has blocked."""
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises BrowserError."""
        self._number += 1
        sent = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            sent["sessionId"] = self._session
        os.write(self._out, json.dumps(sent).encode() + b"\0")
        until = time.monotonic() + ANSWER_S
        while True:
            found = self._receive(until, method)
            if found.get("id") == self._number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error'].get('message')}")
                result: dict[str, Any] = found["result"]
                return result
            self._note(found)

    def _receive(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                raise BrowserError(f"{what}: the browser did not answer within {ANSWER_S:g} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise BrowserError(f"{what}: the browser exited with code {self._process.poll()}")
            self._left += data
        text, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description") or details.get("text")))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.problems.append(f"a JavaScript dialog: {parameters.get('message')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression of JavaScript; a promise is waited for. Raises BrowserError."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(str(details.get("exception", {}).get("description") or details.get("text")))
        return found["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 10.0) -> Any:
        """Wait until an expression of JavaScript is true in the page; its value. It is evaluated after each frame."""
        script = f"""new Promise((resolve) => {{
            const until = Date.now() + {timeout_s * 1000:.0f};
            const look = () => {{
                let found = null;
                try {{ found = ({condition}); }} catch (error) {{ found = null; }}
                if (found || Date.now() > until) resolve(found instanceof Node ? true : found || null);
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        found = self.evaluate(script)
        if not found:
            shown = self.evaluate("document.body ? document.body.innerText.slice(0, 3000) : ''")
            raise BrowserError(f"not within {timeout_s:g} s: {condition}\nthe page shows:\n{shown}\n{self.problems}")
        return found

    def text(self, selector: str) -> str:
        """The text of the first element that the selector finds."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def prefer(self, scheme: str) -> None:
        """scheme: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """What is visible, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: the browser's helpers too
        self._process.wait()
        self._selector.close()
        for descriptor in (self._out, self._in):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
