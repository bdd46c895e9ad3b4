"""A real browser, Debian's Chromium, driven through the pipe of its debugger."""

import base64
import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync", "hide-scrollbars",
    "disable-background-networking", "disable-component-update",
)  # fmt: skip
HANG = 120.0
"""Seconds after which a browser is taken to hang."""


class Navigated(AssertionError):
    """The page went away while it was asked something."""


class Browser:
    """One page. It remembers which addresses were asked for and what the console said."""

    def __init__(self, profile: Path, flags: Sequence[str] = ()) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        words = [f"--{flag}" for flag in (*QUIET, *flags, "remote-debugging-pipe", f"user-data-dir={profile}")]
        inherited = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", inherited, "browser", str(CHROMIUM), *words], pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._buffer, self._session = 0, b"", ""
        self.asked: list[str] = []
        self.said: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(
            self._write, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            left = re.search("navigated|context", answer["error"]["message"])
            raise (Navigated if left else AssertionError)(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], HANG)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.said.append(json.dumps(params)[:600])

    def open(self, address: str, drawn: str = "document.documentElement?.dataset.drawn === 'yes'") -> None:
        self.call("Page.navigate", url=address)
        self.wait(drawn)

    def get(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + HANG
        while not self._holds(condition):
            assert time.monotonic() < deadline, f"{condition} did not come true; the console said {self.said}"
            time.sleep(0.02)

    def _holds(self, condition: str) -> bool:
        try:
            return self.get(condition)
        except Navigated:
            return False

    def look_like(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = ""
            self.call("Browser.close")
        self.process.kill()
        self.process.wait()
        os.close(self._write)
        os.close(self._read)


@contextlib.contextmanager
def browsing(flags: Sequence[str] = ()) -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile), flags)
        try:
            yield browser
        finally:
            browser.close()
