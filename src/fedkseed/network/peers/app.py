"""The requests that one peer can make of another, as an ASGI application.

    GET  /v1/RUN/set?digest=HEX   204: this set has the same digest; else the digest of each round's entries
    GET  /v1/RUN/names?rounds=…   of each of these rounds: the number of its entries (u32), and their names
    POST /v1/RUN/want             names; the entries of those that are here, each after its length (u32)
    POST /v1/RUN/give             such entries; 204: all are taken, 422: one was refused, and why

RUN are 16 digits of the run's digest; digests and names have 32 bytes. A refusal is a status and one line of text. Who
asks is known by the key of its TLS connection: others than the run's peers get no answer at all.
"""

import asyncio
import ssl
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...errors import FedKSeedError
from ..http_server import Crowd, listen, read_body, serving
from ..https.app import REFUSALS
from ..limits import BURST, CONNECTIONS, REQUEST, WORK, Quota, RequestError
from ..protocol.signatures import fingerprint
from . import tls
from .signed_upload import DIGEST, cut, framed, unframed
from .store import UploadStore

BATCH = 64  # entries of a request, and rounds whose names are asked for
PREFIX = 8  # bytes of the run's digest in a path


def path_of(run: bytes) -> str:
    """The first part of all paths of a run."""
    return f"/v1/{run[:PREFIX].hex()}"


def serving_uploads(
    app: Starlette, store: UploadStore, host: str, port: int, context: ssl.SSLContext
) -> AbstractContextManager[None]:
    """Answer requests of the run's peers, and of nobody else, for the length of a `with` block."""
    numbers = {fingerprint(key): number for number, key in enumerate(store.rule.keys)}

    def owner_of(transport: asyncio.BaseTransport) -> int | None:
        return numbers.get(tls.fingerprint_shown(transport.get_extra_info("ssl_object")))

    return serving(app, listen(host, port), context, Crowd(CONNECTIONS, owner_of))


def application(store: UploadStore, open_round: Callable[[], int], most: int, heard: Callable[[], object]) -> Starlette:
    """The application of a peer.

    Args:
        most: bytes of the largest entry.
        heard: called when something new was given.
    """
    work, turns = Quota(WORK, BURST), defaultdict[int, asyncio.Lock](asyncio.Lock)

    def compare(request: Request, body: bytes) -> Response:
        try:
            theirs = bytes.fromhex(request.query_params.get("digest", ""))
        except ValueError:
            raise RequestError(400, "a digest is written in hexadecimal digits") from None
        return Response(status_code=204) if theirs == store.digest() else Response(b"".join(store.digests()))

    def names(request: Request, body: bytes) -> Response:
        text = request.query_params.get("rounds", "")
        try:
            rounds = [int(part) for part in text.split(",")]
        except ValueError:
            raise RequestError(400, "rounds are numbers with commas between them") from None
        if len(rounds) > BATCH:
            raise RequestError(400, f"at most {BATCH} rounds are asked for at once")
        lists = [store.names(round_) for round_ in rounds]
        return Response(b"".join(len(some).to_bytes(4, "little") + b"".join(some) for some in lists))

    def want(request: Request, body: bytes) -> Response:
        if len(body) % DIGEST:
            raise RequestError(400, f"names have {DIGEST} bytes each")
        return Response(framed(store.data(cut(body))))

    def give(request: Request, body: bytes) -> Response:
        try:
            added, refused = store.add(unframed(body, BATCH), open_round())
        except FedKSeedError as error:
            raise RequestError(400, str(error)) from None
        if added:
            heard()
        if refused:
            raise RequestError(422, refused[0])
        return Response(status_code=204)

    def route(path: str, method: str, endpoint: Callable[[Request, bytes], Response], largest: int = 0) -> Route:
        async def answered(request: Request) -> Response:
            if (number := request.state.connection.owner) is None:
                raise RequestError(403, "the key of this connection is no peer's of the run")
            if request.path_params["run"] != (run := store.rule.run[:PREFIX].hex()):
                what = "recipe, base model, tokenizer, keys and times"
                raise RequestError(409, f"this peer works on the run {run}: compare {what}")
            async with turns[number]:  # one body at a time, and after what the last one has cost
                await asyncio.sleep(work.wait(number))
                body = await read_body(request.scope, request.receive, largest)
                begin = time.thread_time()
                try:
                    return endpoint(request, body)
                finally:
                    work.charge(number, REQUEST + time.thread_time() - begin)

        return Route(f"/v1/{{run}}/{path}", answered, methods=[method])

    routes = [
        route("set", "GET", compare),
        route("names", "GET", names),
        route("want", "POST", want, BATCH * DIGEST),
        route("give", "POST", give, BATCH * (most + 4)),
    ]
    return Starlette(routes=routes, exception_handlers=REFUSALS)
