"""The requests of a client, as an ASGI application.

    GET  /v1/challenge               32 bytes to sign
    POST /v1/session                 the challenge, signed: who the client is, and a token for what follows
    GET  /v1/task?wait=S&after=KEY   waits for a task: its stub (task_files.py), or 204 if there was none for S seconds
    GET  /v1/file/SHA-256            a large part of a task; any cache may keep it, for good
    POST /v1/task/KEY                the reply to a task
    POST /v1/checks                  names of the checks of `fedkseed doctor` that fail; none: all pass

With a page for clients in browsers (browser_page.py) there are its files, too. A refusal is a status and one line of
text. Whoever has a file's SHA-256 may read it: only clients are sent one.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from email.utils import formatdate
from tempfile import SpooledTemporaryFile
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..http_server import read_body, refuse, write_body
from ..limits import BURST, PENALTY, REQUEST, WORK, WRITES, Quota, RequestError
from .browser_page import IMMUTABLE, Page
from .connections import CHECKS, PROOF, Connections, whole
from .task_files import DIGEST, KEY

SPOOLED = 1 << 20  # bytes of a reply that are held in memory; a larger one is a file until its turn comes
LONGEST = 240.0  # seconds for which a request waits: proxies and home routers drop what is silent for five minutes


async def refusal(request: Request, error: Exception) -> Response:
    """The answer to a request that is refused: the status of a `RequestError`, and its text."""
    if isinstance(error, HTTPException):
        return PlainTextResponse("no such request: docs/session.md and docs/peers.md have them\n", error.status_code)
    return PlainTextResponse(f"{error}\n", getattr(error, "status", 400))


REFUSALS = dict.fromkeys((RequestError, HTTPException), refusal)


def application(connections: Connections, largest: int, strangers: Quota, page: Page | None, folder: str | None) -> Any:
    """The application of a server.

    Args:
        largest: bytes of the largest reply; more are not read.
        strangers: limits requests without a session, to any path, by address.
        page: for clients in browsers.
        folder: for large replies until they are added up; None: the system's, which may be in memory.
    """
    reading, work = dict[int, asyncio.Future[None]](), Quota(WORK, BURST)

    async def challenge(request: Request) -> Response:
        dated = {"cache-control": "no-store", "date": formatdate(usegmt=True)}  # shows a client that its clock is off
        return Response(connections.challenge(), headers=dated)

    async def session(request: Request) -> Response:
        number, token = connections.session(await read_body(request.scope, request.receive, PROOF))
        return JSONResponse({"client": number, "token": token, "wait": LONGEST})

    async def task(request: Request) -> Response:
        after = _bytes(request.query_params.get("after", ""), "a task's key", (0, KEY))
        try:
            seconds = min(LONGEST, max(0.0, float(request.query_params.get("wait", 0))))
        except ValueError:
            raise RequestError(400, "wait is a number of seconds") from None
        stub = await connections.next(_token(request), after, seconds)
        return Response(stub) if stub else Response(status_code=204)

    async def file(request: Request) -> Response:
        digest = _bytes(request.path_params["digest"], "a SHA-256", (DIGEST,))
        data = connections.file(digest)
        if len(data) <= WRITES:
            return Response(data, headers=IMMUTABLE)

        async def parts() -> AsyncIterator[bytes]:  # whole, each reader would have a copy of its own
            for at in range(0, len(data), WRITES):
                yield data[at : at + WRITES]

        return StreamingResponse(parts(), headers=IMMUTABLE | {"content-length": str(len(data))})

    async def answer(request: Request) -> Response:
        token, key = _token(request), _bytes(request.path_params["key"], "a task's key", (KEY,))
        number = connections.owed(token, key).client  # before the body is read
        if number in reading:  # a client sends one answer at a time: its connection broke, or it means harm
            reading[number].cancel()
        with ExitStack() as unless_taken:
            body = unless_taken.enter_context(SpooledTemporaryFile(SPOOLED, dir=folder))
            mine = asyncio.ensure_future(write_body(request.scope, request.receive, largest, body))
            reading[number] = mine
            try:
                await mine
                connections.answer(token, key, body if body.tell() > SPOOLED else whole(body))
                unless_taken.pop_all()
            except asyncio.CancelledError:
                raise RequestError(409, "another request of this client brings its answer") from None
            finally:
                if reading.get(number) is mine:
                    del reading[number]
        return Response(status_code=204)

    async def checks(request: Request) -> Response:
        token = _token(request)
        connections.checked(token, await read_body(request.scope, request.receive, CHECKS))
        return Response(status_code=204)

    routes = [
        Route("/v1/challenge", challenge),
        Route("/v1/session", session, methods=["POST"]),
        Route("/v1/task", task),
        Route("/v1/file/{digest}", file),
        Route("/v1/task/{key}", answer, methods=["POST"]),
        Route("/v1/checks", checks, methods=["POST"]),
    ]
    routed = Starlette(routes=routes + (page.routes() if page else []), exception_handlers=REFUSALS)

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        """Answer clients as their share of work allows, and strangers as their number of requests does, on any path."""
        connection, number = scope["state"]["connection"], None
        connection.asking = asyncio.current_task()
        shown = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ").decode("latin-1")
        token = shown or connection.token
        with suppress(RequestError):  # which is its answer where it needs a session
            number = connections.client(token).number
        if number is not None:
            connection.belongs(("client", number), token)
            await asyncio.sleep(work.wait(number))
            work.charge(number, REQUEST)
            await routed(scope, receive, send)
        elif scope["client"] is None or strangers.takes(scope["client"][0]):
            await routed(scope, receive, send)
        else:
            await asyncio.sleep(PENALTY)
            await refuse(send, RequestError(429, "too many requests from this address: wait a little"))

    return limited


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
