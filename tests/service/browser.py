"""A headless Chromium, spoken to in the WebDriver protocol (w3.org/TR/webdriver2)."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.processes import free_port

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One window."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._command("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page."""
        return self._command("execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def click(self, selector: str) -> None:
        self._command(f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, keys: str) -> None:
        self._command(f"element/{self._find(selector)}/value", {"text": keys})

    def complaints(self) -> list[str]:
        """Errors of the page, and whatever its policy forbade; not what a server refused."""
        entries = self._command("se/log", {"type": "browser"})
        return [
            entry["message"]
            for entry in entries
            if entry["level"] == "SEVERE" and "the server responded with" not in entry["message"]
        ]

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self._command("screenshot", None)))
        return path

    def until(self, holds: Callable[[], Any], seconds: float = 15) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < deadline, "the page did not come to show it"
            time.sleep(0.1)
        return found

    def _find(self, selector: str) -> str:
        found = self._command("element", {"using": "css selector", "value": selector})
        return found[ELEMENT]

    def _command(self, name: str, body: dict[str, Any] | None) -> Any:
        answer = (
            self._session.get(name) if body is None else self._session.post(name, json=body)
        ).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


@contextmanager
def chromium(width: int = 1280, height: int = 1500, *, dark: bool = False) -> Iterator[Browser]:
    """A window of that size; the test is skipped where no Chromium is installed."""
    driver = shutil.which("chromedriver")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if driver is None or program is None:
        pytest.skip("no chromium and chromedriver here")
    port = free_port()
    process = subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--disable-background-networking", "--hide-scrollbars",
               f"--window-size={width},{height}"]  # fmt: skip
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    capabilities = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": program, "args": options},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            session = _session(client, {"capabilities": {"alwaysMatch": capabilities}})
            at = f"/session/{session}"
            client.base_url = f"http://127.0.0.1:{port}{at}/"
            try:
                yield Browser(client)
            finally:
                with suppress(httpx.HTTPError):
                    httpx.delete(f"http://127.0.0.1:{port}{at}", timeout=30)
    finally:
        process.terminate()
        process.wait(timeout=10)


def _session(client: httpx.Client, wanted: dict[str, Any]) -> str:
    deadline = time.monotonic() + 30
    while True:
        try:
            value = client.post("/session", json=wanted).json()["value"]
            assert "sessionId" in value, value
            return value["sessionId"]
        except httpx.ConnectError:
            assert time.monotonic() < deadline, "chromedriver does not answer"
            time.sleep(0.1)
