"""The requests of a client, as an ASGI application, and the two ends of the HTTPS connections that carry them.

    GET  /v1/challenge               32 bytes to sign
    POST /v1/session                 the challenge, signed: who the client is, and a token for what follows
    GET  /v1/task?wait=S&after=KEY   waits for a task: its stub (task_files.py), or 204 if there was none for S seconds
    GET  /v1/file/SHA-256            a large part of a task; any cache may keep it, for good
    POST /v1/task/KEY                the reply to a task

With a page for clients in browsers (browser_page.py) there are its files, too. A refusal is a status and one line of
text. Whoever has a file's SHA-256 may read it: only clients are sent one.
"""

import asyncio
import resource
import socket
import ssl
import threading
import time
from asyncio import sslproto
from collections.abc import Awaitable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ...errors import FedKSeedError
from ...files import OTHER_PORT, border
from ..protocol.server.request_limits import Quota
from .browser_page import IMMUTABLE, Page
from .connections import PROOF, Connections, RequestError
from .task_files import DIGEST, KEY
from .way_out import WayOut

LONGEST = 240.0  # seconds for which a request waits: proxies and home routers drop what is silent for five minutes
PATIENCE = 10.0  # seconds between two parts of a body
TLS_BUFFER = 1 << 13  # bytes read of a connection at once; asyncio keeps 256 KB for each, 5 GB for 20,000 clients
START = 30.0  # seconds for the port to be open, and for the server to end after its connections
LINGER = 3.0  # seconds for connections to end by themselves; uvicorn's patience is longer
KEEP_ALIVE = 300  # seconds for which a connection without a request is kept; a request waits up to 240


async def refusal(request: Request, error: Exception) -> Response:
    """The answer to a request that is refused: the status of a `RequestError`, and its text; 400 to a cut-off one."""
    if isinstance(error, RequestError):
        return PlainTextResponse(f"{error}\n", error.status)
    if isinstance(error, HTTPException):
        return PlainTextResponse("no such request: docs/session.md and docs/peers.md have them\n", error.status_code)
    return Response(status_code=400)


REFUSALS = dict.fromkeys((RequestError, HTTPException, ClientDisconnect), refusal)


def application(connections: Connections, largest: int, strangers: Quota, page: Page | None) -> Starlette:
    """The application of a server.

    Args:
        largest: bytes of the largest reply; more are not read.
        strangers: limits requests without a session, by address.
        page: for clients in browsers.
    """

    def limited(request: Request) -> None:
        if request.client is not None and not strangers.takes(request.client.host):
            raise RequestError(429, "too many requests from this address: wait a little")

    async def challenge(request: Request) -> Response:
        limited(request)
        return Response(connections.challenge(), headers={"cache-control": "no-store"})

    async def session(request: Request) -> Response:
        limited(request)
        number, token = connections.session(await read_body(request, PROOF))
        return JSONResponse({"client": number, "token": token, "wait": LONGEST})

    async def task(request: Request) -> Response:
        after = _bytes(request.query_params.get("after", ""), "a task's key", (0, KEY))
        try:
            seconds = min(LONGEST, max(0.0, float(request.query_params.get("wait", 0))))
        except ValueError:
            raise RequestError(400, "wait is a number of seconds") from None
        stub = await _unless_gone(request, connections.next(_token(request), after, seconds))
        return Response(stub) if stub else Response(status_code=204)

    async def file(request: Request) -> Response:
        digest = _bytes(request.path_params["digest"], "a SHA-256", (DIGEST,))
        return Response(connections.file(digest), headers=IMMUTABLE)

    async def answer(request: Request) -> Response:
        token, key = _token(request), _bytes(request.path_params["key"], "a task's key", (KEY,))
        connections.client(token)  # before the body is read
        connections.answer(token, key, await read_body(request, largest))
        return Response(status_code=204)

    routes = [
        Route("/v1/challenge", challenge),
        Route("/v1/session", session, methods=["POST"]),
        Route("/v1/task", task),
        Route("/v1/file/{digest}", file),
        Route("/v1/task/{key}", answer, methods=["POST"]),
    ]
    return Starlette(routes=routes + (page.routes() if page else []), exception_handlers=REFUSALS)


def _token(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind != "Bearer" or not token:
        raise RequestError(401, "a request names its session: Authorization: Bearer TOKEN")
    return token


def _bytes(text: str, what: str, lengths: tuple[int, ...]) -> bytes:
    with suppress(ValueError):
        if len(data := bytes.fromhex(text)) in lengths:
            return data
    raise RequestError(400, f"{what} is {2 * lengths[-1]} hexadecimal digits")


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request; memory grows only as it comes.

    Raises:
        RequestError: it is larger than `most` bytes, or stands still.
    """
    data, parts, expected = bytearray(), request.stream(), int(request.headers.get("content-length", 0))
    while max(expected, len(data)) <= most:
        try:
            part = await asyncio.wait_for(anext(parts, None), PATIENCE)
        except TimeoutError:
            raise RequestError(408, f"no part of the body came for {PATIENCE:g} s") from None
        if part is None:
            return bytes(data)
        data += part
    raise RequestError(413, f"at most {most:,} bytes are read")


async def _unless_gone(request: Request, waiting: Awaitable[bytes | None]) -> bytes | None:
    """The result of a wait that ends when the client is gone."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass  # a request without a body says first that it is over

    wait, gone = asyncio.ensure_future(waiting), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({wait, gone}, return_when=asyncio.FIRST_COMPLETED)
        if wait.done():
            return wait.result()
        gone.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        wait.cancel()
        with suppress(asyncio.CancelledError, FedKSeedError):
            await wait


@contextmanager
def serving(app: Starlette, host: str, port: int, tls: ssl.SSLContext | None, **options: Any) -> Iterator[None]:
    """Answer requests on a thread of their own for the length of a `with` block.

    Args:
        tls: None: requests come from a proxy on this machine, which has the certificate.
        options: further settings of uvicorn.

    Raises:
        FedKSeedError: the port is taken.
    """
    sslproto.SSLProtocol.max_size = TLS_BUFFER
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each client has one connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    config = uvicorn.Config(
        app, host=host, port=port, access_log=False, ws="none", lifespan="off", timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=5, backlog=4096, server_header=False, date_header=False, proxy_headers=tls is None,
        **{"log_level": "error", **options},
    )  # fmt: skip
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    with border(f"can't listen on port {port} of {host}", OTHER_PORT):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: takes IPv4, too
        # uvicorn's own listener would end the process if the port is taken
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    with closing(listener):
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        end = time.monotonic() + START
        while not server.started:
            if not thread.is_alive() or time.monotonic() > end:
                raise FedKSeedError(f"the server on port {port} of {host} did not start")
            time.sleep(0.01)
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(LINGER)
            # Browsers answer the end of TLS on none of the connections that they keep for later.
            for connection in [*server.server_state.connections]:
                with suppress(RuntimeError):  # its loop has ended meanwhile
                    connection.loop.call_soon_threadsafe(connection.transport.abort)
            thread.join(START)


def http_client(tls: ssl.SSLContext, timeout: float, connections: int | None = None, url: str = "") -> httpx.Client:
    """A client that keeps its connections open, and sends none of httpx's headers: they are most of an idle hour's
    bytes. Of the environment it obeys proxies alone (way_out.py).

    Args:
        timeout: seconds between two signs of life of a server.
        connections: number of connections at most; None: any number.
        url: of all its requests.
    """
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=None)
    client = httpx.Client(base_url=url, transport=WayOut(tls, limits), timeout=timeout, trust_env=False)
    for name in ("accept", "accept-encoding", "user-agent", "connection"):
        del client.headers[name]
    return client
