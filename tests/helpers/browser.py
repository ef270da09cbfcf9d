"""A headless Chromium for tests, controlled over a pipe: pages, their logs and requests.

The DevTools protocol: JSON messages, each ended by a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
WHY_NOT = "no Chromium here: make test installs it"
_REPLY_S = 60.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One Chromium with one page. *folder* is its profile and must be empty.

    ``requests`` are the URLs that pages requested, ``errors`` their logged errors and exceptions.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None, WHY_NOT
        self.requests: list[str] = []
        self.errors: list[str] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", PROGRAM, *_FLAGS,
             f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._left = b""
        self._number = 0
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **terms: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": terms}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _REPLY_S
        while True:
            reply = self._next(deadline)
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]
            self._record(reply)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._in], [], [], left_s)[0], "Chromium does not reply"
            data = os.read(self._in, 1 << 16)
            assert data, "Chromium ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _record(self, event: dict[str, Any]) -> None:
        terms = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(terms["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(terms["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if terms["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(terms["args"]))
            case "Log.entryAdded" if terms["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(terms["entry"]))

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"][
            "value"
        ]

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _REPLY_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} did not become true"
            time.sleep(0.05)

    def show(self, url: str, *, width: int = 1280, dark: bool = False) -> None:
        """Load a page, *width* pixels wide."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()
