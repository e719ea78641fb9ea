"""A headless Chromium, driven over its debugging pipe: for tests of pages, and for looking at them.

Messages of the DevTools protocol are JSON objects with a zero byte behind each, on descriptors 3 and 4 of
the browser, so no port is opened and no client library is needed. One thread uses a browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

PATIENCE = 60.0
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars "
    "--remote-debugging-pipe"
)


def find_chromium() -> str:
    """Return the browser's path, or skip the test."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("needs Chromium: `make servers` installs it")
    return found


class Browser:
    """A browser with one tab. As a context manager it ends when left."""

    def __init__(self, folder: Path) -> None:
        """Start it with a profile in `folder`."""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = f'exec "$0" {_FLAGS} --user-data-dir="$1" about:blank 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, find_chromium(), str(folder)],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        (tab,) = [one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # it ends with its pipe
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page and its files are loaded."""
        self.events.clear()
        self.send("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def run(self, expression: str) -> Any:
        """Return what an expression in the page gives; a promise is awaited."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(expression):
            assert time.monotonic() < deadline, (expression, self.run("document.body.innerText"))
            self.run("new Promise(resolve => requestAnimationFrame(resolve))")

    def text(self, selector: str) -> str:
        """Return what a reader sees of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def resize(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Give the window a size and the system a colour scheme."""
        mobile = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """Return what the browser has complained about: exceptions, and entries of its log and console."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:1000])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(params["args"])[:1000])
        return found
