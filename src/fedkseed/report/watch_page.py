"""The report of one run as a page that renews itself, served by this process.

    /             the page
    /now.json     the state of the run, a few kilobytes, which the page asks for every few seconds
    /report.json  the data of the report, asked for when the state has another version

Nothing else is served, and nothing can be changed. On a loopback address, requests that name another host are refused:
else a page of a stranger, open in the same browser, could let its own name point here, and read the run.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import cast
from urllib.parse import urlsplit

from ..errors import FedKSeedError
from ..files import OTHER_PORT, border
from ..run.store import Store
from .page import content, document
from .watch_state import Watched

JSON = "application/json"


class Server(ThreadingHTTPServer):
    """The server of one run's page; an address that can't be used is refused."""

    daemon_threads = True

    def __init__(self, directory: Path, host: str, port: int) -> None:
        self.directory, self.watched, self._looking = directory, Watched(directory), Lock()
        with border(f"can't listen on port {port} of {host}", OTHER_PORT):
            super().__init__((host, port), Handler)
        local = ip_address(str(self.server_address[0])).is_loopback
        self.names = {host, "localhost", "127.0.0.1"} if local else None  # by which browsers may call; None: any

    def page(self, path: str) -> tuple[str, str] | None:
        """The type and text that a path has; None for any other."""
        with self._looking:  # one request after the other
            view = self.watched.look()
        match path:
            case "/":
                return "text/html", document(view.name, "null", live=True)
            case "/now.json":  # without what the report has too
                return JSON, json.dumps(asdict(replace(view, reports=(), means={})) | {"notes": view.notes})
            case "/report.json":
                return JSON, content([Store(self.directory, looks=True)], [view.name])
        return None


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        server = cast(Server, self.server)
        called = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if server.names is not None and called not in server.names:
            self.send_error(HTTPStatus.FORBIDDEN, explain="this page answers to localhost alone")
            return
        try:
            page = server.page(urlsplit(self.path).path)
        except FedKSeedError as error:  # the store is being written; the page asks again
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, body = page[0], page[1].encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        """Print no line: the page asks every two seconds."""


def serve(directory: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of a run until the process is stopped."""
    with Server(directory, host, port) as server:
        say("http://{}:{}/ shows {}; Ctrl-C ends it".format(*server.server_address[:2], directory))
        server.serve_forever()
