"""Headless Chromium, spoken to in its DevTools protocol over two pipes: no package is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["Browser"]

_OPTIONS = """--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking
--remote-debugging-pipe --allow-file-access-from-files"""
_HEIGHT = 900


class Browser:
    """One tab of a browser; ``events`` has what happened since the last page was opened."""

    def __init__(self, binary: str, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium reads commands from 3, and answers to 4.
        call = ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', binary, *_OPTIONS.split()]
        call += [f"--user-data-dir={profile}", "about:blank"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(call, pass_fds=(commands, answers), **quiet)
        os.close(commands)
        os.close(answers)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and wait for what it answers."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, width: int, scheme: str = "light", query: str = "") -> None:
        """Show a page in a window of some width, in a light or a dark scheme, and wait until it has been loaded."""
        self.events.clear()
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=_HEIGHT, deviceScaleFactor=1, mobile=False)
        self.do("Page.navigate", url=page.resolve().as_uri() + query)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def ask(self, script: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def save_picture(self, path: Path) -> None:
        """Write the whole page, which may be longer than the window."""
        size = self.do("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16_000), "scale": 1}
        data = self.do("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._commands)
        os.close(self._answers)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise RuntimeError("Expected an answer of the browser, but it has ended.")
            self._rest += read
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message
