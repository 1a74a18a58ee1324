"""The requests of a client, as an ASGI application.

    GET  /v1/challenge               32 bytes to sign
    POST /v1/session                 the challenge, signed: who the client is, and a token for what follows
    GET  /v1/task?wait=S&after=KEY   waits for a task: its stub (task_files.py), or 204 if there was none for S seconds
    GET  /v1/file/SHA-256            a large part of a task; any cache may keep it, for good
    POST /v1/task/KEY                the reply to a task

With a page for clients in browsers (browser_page.py) there are its files, too. A refusal is a status and one line of
text. Whoever has a file's SHA-256 may read it: only clients are sent one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ...errors import FedKSeedError
from ..protocol.server.request_limits import Quota
from .browser_page import IMMUTABLE, Page
from .connections import PROOF, Connections, RequestError
from .task_files import DIGEST, KEY

LONGEST = 240.0  # seconds for which a request waits: proxies and home routers drop what is silent for five minutes
PATIENCE = 10.0  # seconds between two parts of a body

Answer: TypeAlias = Callable[[Request], Awaitable[Response]]


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

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return PlainTextResponse("no such request: docs/session.md has them all\n", status)

    return Starlette(
        routes=[
            Route("/v1/challenge", refusing(challenge)),
            Route("/v1/session", refusing(session), methods=["POST"]),
            Route("/v1/task", refusing(task)),
            Route("/v1/file/{digest}", refusing(file)),
            Route("/v1/task/{key}", refusing(answer), methods=["POST"]),
            *(page.routes() if page else ()),
        ],
        exception_handlers={404: unknown, 405: unknown},
    )


def refusing(endpoint: Answer) -> Answer:
    """The endpoint with a refusal as its answer: the status of a `RequestError`, and its text."""

    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as refusal:
            return PlainTextResponse(f"{refusal}\n", refusal.status)
        except ClientDisconnect:
            return Response(status_code=400)

    return answered


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
    if int(request.headers.get("content-length", 0)) > most:
        raise RequestError(413, f"at most {most:,} bytes are read")
    data, parts = bytearray(), request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(parts, None), PATIENCE)
        except TimeoutError:
            raise RequestError(408, f"no part of the body came for {PATIENCE:g} s") from None
        if part is None:
            return bytes(data)
        data += part
        if len(data) > most:
            raise RequestError(413, f"at most {most:,} bytes are read")


async def _unless_gone(request: Request, waiting: Awaitable[bytes | None]) -> bytes | None:
    """The result of a wait that ends when the client is gone."""
    wait = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(request.receive())  # a request without a body says next that it is over
    try:
        while True:
            await asyncio.wait({wait, gone}, return_when=asyncio.FIRST_COMPLETED)
            if wait.done():
                return wait.result()
            if gone.result()["type"] == "http.disconnect":
                raise ClientDisconnect
            gone = asyncio.ensure_future(request.receive())
    finally:
        gone.cancel()
        wait.cancel()
        with suppress(asyncio.CancelledError, FedKSeedError):
            await wait
