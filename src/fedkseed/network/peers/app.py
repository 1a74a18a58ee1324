"""The requests that one peer can make of another, as an ASGI application.

    GET  /v1/RUN/set?digest=HEX   204: this set has the same digest; else the digest of each round's entries
    GET  /v1/RUN/names?rounds=…   of each of these rounds: the number of its entries (u32), and their names
    POST /v1/RUN/want             names; the entries of those that are here, each after its length (u32)
    POST /v1/RUN/give             such entries; 204: all are taken, 422: one was refused, and why

RUN are 16 digits of the run's digest; digests and names have 32 bytes. A refusal is a status and one line of text. Who
asks is known by the key of its TLS connection: others than the run's peers get no answer at all.
"""

import ssl
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...errors import FedKSeedError
from ..https.app import REFUSALS, read_body, serving
from ..https.connections import RequestError
from ..protocol.server.request_limits import Quota
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

    class PeerProtocol(H11Protocol):
        def connection_made(self, transport) -> None:
            number = numbers.get(tls.fingerprint_shown(transport.get_extra_info("ssl_object")))
            if number is None:
                transport.abort()
            self.app_state = {**self.app_state, "peer": number}
            super().connection_made(transport)

    return serving(app, host, port, context, http=PeerProtocol, log_level="critical")


def application(store: UploadStore, open_round: Callable[[], int], most: int, heard: Callable[[], object]) -> Starlette:
    """The application of a peer.

    Args:
        most: bytes of the largest entry.
        heard: called when something new was given.
    """
    quota = Quota(50, 400)

    async def compare(request: Request) -> Response:
        try:
            theirs = bytes.fromhex(request.query_params.get("digest", ""))
        except ValueError:
            raise RequestError(400, "a digest is written in hexadecimal digits") from None
        return Response(status_code=204) if theirs == store.digest() else Response(b"".join(store.digests()))

    async def names(request: Request) -> Response:
        text = request.query_params.get("rounds", "")
        try:
            rounds = [int(part) for part in text.split(",")]
        except ValueError:
            raise RequestError(400, "rounds are numbers with commas between them") from None
        if len(rounds) > BATCH:
            raise RequestError(400, f"at most {BATCH} rounds are asked for at once")
        lists = [store.names(round_) for round_ in rounds]
        return Response(b"".join(len(some).to_bytes(4, "little") + b"".join(some) for some in lists))

    async def want(request: Request) -> Response:
        body = await read_body(request, BATCH * DIGEST)
        if len(body) % DIGEST:
            raise RequestError(400, f"names have {DIGEST} bytes each")
        return Response(framed(store.data(cut(body))))

    async def give(request: Request) -> Response:
        body = await read_body(request, BATCH * (most + 4))
        try:
            added, refused = store.add(unframed(body, BATCH), open_round())
        except FedKSeedError as error:
            raise RequestError(400, str(error)) from None
        if added:
            heard()
        if refused:
            raise RequestError(422, refused[0])
        return Response(status_code=204)

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            if (number := getattr(request.state, "peer", None)) is None:
                raise RequestError(403, "the key of this connection is no peer's of the run")
            if not quota.takes(number):
                raise RequestError(429, "too many requests of this peer: wait a little")
            if request.path_params["run"] != (run := store.rule.run[:PREFIX].hex()):
                raise RequestError(409, f"this peer works on the run {run}: compare recipe, base model, keys and times")
            return await endpoint(request)

        return answered

    routes = [
        Route("/v1/{run}/set", guarded(compare)),
        Route("/v1/{run}/names", guarded(names)),
        Route("/v1/{run}/want", guarded(want), methods=["POST"]),
        Route("/v1/{run}/give", guarded(give), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers=REFUSALS)
