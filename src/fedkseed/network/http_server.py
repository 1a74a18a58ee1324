"""A server of HTTP that holds requests to limits.py: of `serve`, `shard`, `peer`, `serve-model` and `watch --serve`."""

import asyncio
import hmac
import re
import resource
import socket
import ssl
import threading
import time
from asyncio import sslproto
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import FedKSeedError
from ..files import OTHER_PORT, border
from . import limits
from .limits import RequestError
from .protocol.addresses import is_loopback

TLS_BUFFER = 1 << 13  # bytes read of a connection at once; asyncio keeps 256 KB for each, 5 GB for 20,000 clients
START = 30.0  # seconds for the server to be up, and to end after its connections


def address_of(transport: asyncio.BaseTransport) -> Hashable:
    """The address of the other side."""
    return (transport.get_extra_info("peername") or ("",))[0]


class Crowd:
    """The connections of each owner, as an address or a client: beyond `most`, its longest idle one ends.

    Args:
        owner_of: returns the owner of a new connection by its transport; None: it is to end at once.
    """

    def __init__(self, most: int, owner_of: Callable[[asyncio.BaseTransport], Hashable] = address_of) -> None:
        self.most, self.owner_of = most, owner_of
        self._connections: dict[Hashable, dict[BoundedProtocol, None]] = {}

    def take(self, connection: "BoundedProtocol", owner: Hashable, most: int) -> None:
        """Let a connection be an owner's, which may have `most`."""
        self.forget(connection)
        connection.owner = owner
        of_owner = self._connections.setdefault(owner, {})
        of_owner[connection] = None
        if len(of_owner) > most:
            ended = next((one for one in of_owner if not one.busy), connection)
            self.forget(ended)
            ended.transport.abort()

    def forget(self, connection: "BoundedProtocol") -> None:
        of_owner = self._connections.get(connection.owner, {})
        of_owner.pop(connection, None)
        if not of_owner:
            self._connections.pop(connection.owner, None)


class BoundedProtocol(H11Protocol):
    """A connection that ends where its header does not come in time: uvicorn's own waits for ever.

    Requests know it as `scope["state"]["connection"]`.

    Args:
        crowd: None: behind a proxy, which has connections of many.
    """

    def __init__(self, crowd: Crowd | None, **options: Any) -> None:
        super().__init__(**options)
        self.crowd, self.token = crowd, ""
        self.owner: Hashable = None
        self.asking: asyncio.Task[None] | None = None  # ends with the connection
        self.gone = threading.Event()  # set once the other side is gone: work on other threads looks at it
        self.app_state = {**self.app_state, "connection": self}
        self._end: asyncio.TimerHandle | None = None  # of the connection, if what is awaited does not come

    @property
    def busy(self) -> bool:
        """True while a request waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def belongs(self, owner: Hashable, token: str) -> None:
        """Count the connection as that of a client, which has shown the token of its session."""
        if self.crowd is not None:
            self.token = token
            if self.owner != owner:
                self.crowd.take(self, owner, limits.CONNECTIONS)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=limits.WRITES)
        if self.crowd is not None:
            if (owner := self.crowd.owner_of(transport)) is None:
                transport.abort()
            self.crowd.take(self, owner, self.crowd.most)
        self._time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self.loop.call_later(limits.LINGER, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        for pending in (self._end, self.asking):
            if pending is not None:
                pending.cancel()
        if self.crowd is not None:
            self.crowd.forget(self)
        super().connection_lost(exc)

    def _time(self) -> None:
        """Time a header from its first byte, or the connection, on, and what follows a request that is answered."""
        seconds = None
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            seconds = limits.HEADER_SECONDS
        elif self.conn.their_state is h11.SEND_BODY and not self.busy:
            seconds = limits.LINGER
        if seconds is None and self._end is not None:
            self._end.cancel()
            self._end = None
        elif seconds is not None and self._end is None:
            self._end = self.loop.call_later(seconds, self.transport.abort)


async def read_body(scope: Any, receive: Any, most: int) -> bytes:
    """The body of a request; memory grows only as it comes. See `write_body`."""
    body = BytesIO()
    await write_body(scope, receive, most, body)
    return body.getvalue()


async def write_body(scope: Any, receive: Any, most: int, to: Any) -> None:
    """Write the body of a request to an empty file as it comes.

    Args:
        most: bytes that are read.

    Raises:
        RequestError: it is larger, stands still, or comes more slowly than `SLOWEST`; or its sender is gone.
    """
    expected = int(dict(scope["headers"]).get(b"content-length", 0))
    begin = time.monotonic()
    while max(expected, to.tell()) <= most:
        left = begin + limits.PATIENCE + to.tell() / limits.SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, min(limits.PATIENCE, left)))
        except TimeoutError:
            slow = f"no part of the body came for {limits.PATIENCE:g} s, or under {limits.SLOWEST:g} bytes a second"
            raise RequestError(408, slow) from None
        if message["type"] == "http.disconnect":
            raise RequestError(400, "the body is cut short")
        to.write(message["body"])
        if not message.get("more_body"):
            return
    raise RequestError(413, f"at most {most:,} bytes are read")


async def refuse(send: Any, error: RequestError) -> None:
    """Answer a request with the status and the line of its refusal."""
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{error}\n".encode()})


@dataclass(slots=True)
class Doorkeeper:
    """An application for programs and browsers of this machine, asked by nobody else.

    On a loopback address, requests that name another host are refused: else a page of a stranger, open in the same
    browser, could let its own name point here (DNS rebinding). So are requests of pages from elsewhere.

    Args:
        host: that it listens on.
        token: that requests must show, as `Authorization: Bearer TOKEN` or as the first part of their path; empty: no.
        most: bytes of a request's body.
    """

    app: Any
    host: str
    token: str = ""
    most: int = 1 << 20

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            self._check(scope)
            body = await read_body(scope, receive, self.most)
        except RequestError as error:
            await refuse(send, error)
            return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def received() -> dict[str, Any]:
            return parts.pop() if parts else await receive()

        await self.app(scope, received, send)

    def _check(self, scope: Any) -> None:
        """Refuse a request from elsewhere, or without the token, and take the token out of its path."""
        headers = {name: text.decode("latin-1") for name, text in scope["headers"]}
        called = headers.get(b"host", "")
        name = called.rpartition(":")[0] if re.search(r":\d*$", called) else called
        if is_loopback(self.host) and name not in {self.host, "localhost", "127.0.0.1", "[::1]"}:
            raise RequestError(403, "this address answers to localhost alone")
        if headers.get(b"origin", f"http://{called}") != f"http://{called}":
            raise RequestError(403, "this address answers to no page from elsewhere")
        first, _, path = scope["path"].removeprefix("/").partition("/")
        if self.token and hmac.compare_digest(first.encode(), self.token.encode()):
            scope["path"] = f"/{path}"
        elif self.token:
            shown = headers.get(b"authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(shown.encode(), self.token.encode()):
                raise RequestError(401, "this address wants the token that was printed where it was started")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 is any free one.

    Raises:
        FedKSeedError: the port is taken, or the address is none of this machine.
    """
    with border(f"can't listen on port {port} of {host}", OTHER_PORT):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: takes IPv4, too
        # uvicorn's own listener would end the process if the port is taken
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)


def listening_at(at: socket.socket) -> str:
    """The address of a listening socket, as it stands in a URL: HOST:PORT, an IPv6 address in brackets."""
    host, port = at.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def serving(
    app: Any, at: socket.socket, tls: ssl.SSLContext | None, crowd: Crowd | None, proxied: bool = False
) -> Iterator[None]:
    """Answer requests on a thread of their own for the length of a `with` block.

    Args:
        at: the listener, which is closed in the end.
        proxied: whether requests come from a proxy on this machine, which says whose they are.

    Raises:
        FedKSeedError: the server does not start.
    """
    # asyncio's own patience with TLS is a minute, and with its end half of one.
    sslproto.SSLProtocol.max_size = TLS_BUFFER
    sslproto.constants.SSL_HANDSHAKE_TIMEOUT = limits.HEADER_SECONDS
    sslproto.constants.SSL_SHUTDOWN_TIMEOUT = limits.LINGER
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each client has one connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    protocol: Any = partial(BoundedProtocol, crowd)
    config = uvicorn.Config(
        app, http=protocol, loop="asyncio", h11_max_incomplete_event_size=limits.HEADER_BYTES, access_log=False,
        ws="none", lifespan="off", timeout_keep_alive=limits.KEEP_ALIVE, timeout_graceful_shutdown=5, backlog=4096,
        server_header=False, date_header=False, proxy_headers=proxied, log_level="critical",
    )  # fmt: skip
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    with closing(at):
        thread = threading.Thread(target=server.run, args=([at],), daemon=True)
        try:
            thread.start()
            end = time.monotonic() + START
            while not server.started:
                if not thread.is_alive() or time.monotonic() > end:
                    raise FedKSeedError(f"the server at {listening_at(at)} did not start")
                time.sleep(0.01)
            yield
        finally:
            server.should_exit = True
            thread.join(limits.LINGER)
            # Browsers answer the end of TLS on none of the connections that they keep for later.
            for connection in [*server.server_state.connections]:
                with suppress(RuntimeError):  # its loop has ended meanwhile
                    connection.loop.call_soon_threadsafe(connection.transport.abort)
            thread.join(START)


def serve_locally(app: Any, at: socket.socket, host: str, token: str, ready: Callable[[], object]) -> None:
    """Answer programs and browsers of this machine, and others that have the token, until Ctrl-C.

    Args:
        at: the listener at `host`.
        ready: called when requests are answered.
    """
    with serving(Doorkeeper(app, host, token), at, None, Crowd(limits.CONNECTIONS)):
        ready()
        while True:  # a signal just before a wait without end would be noticed after it
            time.sleep(1)
