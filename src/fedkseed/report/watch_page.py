"""The report of one run as a page that renews itself, served by this process.

    /             the page
    /now.json     the state of the run, a few kilobytes, which the page asks for every few seconds
    /report.json  the data of the report, asked for when the state has another version

Nothing else is served, and nothing can be changed. network/http_server.py says who is answered.
"""

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any

from ..errors import FedKSeedError
from ..run.store import Store
from .page import content, document
from .watch_state import Watched


class RunPage:
    """The ASGI application of one run's page."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.watched, self._looking = directory, Watched(directory), Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["method"] == "GET" else ""
        try:
            status, kind, text = await asyncio.to_thread(self.answer, path)
        except FedKSeedError as error:  # the store is being written; the page asks again
            status, kind, text = 503, "text/plain", f"{error}\n"
        headers = {"content-type": f"{kind}; charset=utf-8", "cache-control": "no-store"}
        headers |= {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": text.encode()})

    def answer(self, path: str) -> tuple[int, str, str]:
        """The status, the type and the text of a path."""
        with self._looking:  # one request after the other
            view = self.watched.look()
        match path:
            case "/":
                return 200, "text/html", document(view.name, "null", live=True)
            case "/now.json":  # without what the report has too
                state = asdict(replace(view, reports=(), means={})) | {"notes": view.notes}
                return 200, "application/json", json.dumps(state)
            case "/report.json":
                return 200, "application/json", content([Store(self.directory, looks=True)], [view.name])
        return 404, "text/plain", "there is /, /now.json and /report.json\n"
