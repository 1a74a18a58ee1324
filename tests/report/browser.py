"""A headless Chromium over its DevTools pipe: opens a page, looks at it, keeps what it complains about."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
]
SECONDS = 240  # a browser that starts on a busy machine; far more than it needs


class Browser:
    """One page of a browser. Messages are JSON and end with a zero byte, as the pipe wants them."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read, self.rest = write, read, b""
        self.session: str | None = None
        self.asked = 0
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command; returns its result. Events that come first are kept."""
        self.asked += 1
        message: dict[str, Any] = {"id": self.asked, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.asked:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path | str, *, width: int = 1280, scheme: str = "light") -> None:
        """Show a file or an address in a window of some width, light or dark, and wait until it is loaded."""
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self._seen("Page.loadEventFired"):
            self.events.append(self._next())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def run(self, script: str) -> Any:
        """The value of a script, awaited."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def choose(self, field: str, *files: Path) -> None:
        """Pick files in a field of the page, as a person does in the browser's own window."""
        found = self.send("Runtime.evaluate", expression=f"document.getElementById({json.dumps(field)})")
        self.send("DOM.setFileInputFiles", files=[*map(str, files)], objectId=found["result"]["objectId"])

    def save_to(self, folder: Path) -> None:
        """Put what the page saves into a folder, without asking."""
        session, self.session = self.session, None
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self.session = session

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, console messages, and what the browser itself logged."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for kind in kinds for event in self._seen(kind)]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return [event["params"]["request"]["url"] for event in self._seen("Network.requestWillBeSent")]

    def _seen(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("method") == method]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], max(0, end - time.monotonic()))
            data = os.read(self.read, 1 << 16) if ready else b""
            if not data:
                raise TimeoutError("the browser ended" if ready else f"the browser was silent for {SECONDS} s")
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(profile: Path, *flags: str) -> Iterator[Browser]:
    """Start a browser with a profile and flags of its own, and end it."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", CHROMIUM or "chromium", *FLAGS]
    with (profile / "stderr").open("wb") as log:
        process = subprocess.Popen(
            [*command, *flags, f"--user-data-dir={profile}"], pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)  # end of its commands: it closes itself
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_in)


def ended(process: subprocess.Popen) -> None:
    """End a server of a test; one that does not end is killed, and the test fails rather than waits for ever."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
