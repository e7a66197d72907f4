"""Chromium without a window, over its debugging pipe: no port, no driver, no packages."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
# The browser reads its orders from descriptor 3 and answers on 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)

Scheme = Literal["light", "dark"]


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page:
    """`requests`: every address that was asked for, if only to be refused, which is in `refusals`
    with the reason; `complaints`: console, log and exceptions."""

    def __init__(self, orders: int, answers: int) -> None:
        self.requests: list[str] = []
        self.refusals: list[str] = []
        self.complaints: list[str] = []
        self._orders, self._answers = orders, answers
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self._events: list[str] = []

    def attach(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def open(self, file: Path, *, width: int, scheme: Scheme, media: str = "") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])
        self._events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait_for("Page.loadEventFired")

    def wait_for(self, event: str) -> None:
        while event not in self._events:
            self._take(self._receive())

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": params}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while (message := self._receive()).get("id") != number:
            self._take(message)
        assert "error" not in message, (method, message["error"])
        result: dict[str, Any] = message["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has gone"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _take(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.loadingFailed":
            self.refusals.append(params.get("blockedReason", params["errorText"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))


@contextmanager
def browser_page(browser: str, profile: Path) -> Iterator[Page]:
    """`profile` is a new, empty folder for the browser's own files."""
    read_orders, orders = os.pipe()
    answers, write_answers = os.pipe()
    # Away from where dup2 puts them.
    ends = [os.dup(read_orders), os.dup(write_answers)]
    for end in ends:
        os.set_inheritable(end, True)
    command = [sys.executable, "-c", _START, *map(str, ends), browser, *FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=ends,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (read_orders, write_answers, *ends):
        os.close(end)
    try:
        yield Page(orders, answers).attach()
    finally:
        process.terminate()
        process.wait(30)
        os.close(orders)
        os.close(answers)
