"""A client of HTTPS that holds answers to limits.py, whatever is sent: that of `join`, `shard` and `peer`."""

import math
import ssl
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx

from ..errors import FedKSeedError
from .https.way_out import WayOut
from .limits import REFUSAL, SLOWEST
from .protocol.envelope import printable

CONNECT = 20.0  # seconds for a connection
DONE = 200, 204  # statuses of an answer that is no refusal
_end: ContextVar[float] = ContextVar("_end", default=math.inf)  # of this thread's request, by time.monotonic


class AnswerError(FedKSeedError):
    """An answer that breaks a limit, or that refuses a request.

    Args:
        status: of the refusal; 0: it is of another kind.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _TimedSocket(ssl.SSLSocket):
    """A socket whose reads and writes all end by the request's deadline; httpx can time single ones only."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        self._spend()
        return super().recv(buflen, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        self._spend()
        return super().send(data, flags)

    def _spend(self) -> None:
        if (left := _end.get() - time.monotonic()) <= 0:
            raise TimeoutError("it comes too slowly")
        if left < (self.gettimeout() or math.inf):
            self.settimeout(left)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer, whole."""

    status: int
    body: bytes
    date: str = ""  # of the server's clock, as HTTP writes it; empty: it says none

    @property
    def text(self) -> str:
        """Its words, for people: one line without control characters."""
        return printable(self.body.decode(errors="replace"))


class BoundedClient:
    """Requests on connections that stay open, with none of httpx's headers: they are most of an idle hour's bytes.

    Of the environment it obeys proxies alone (way_out.py).

    Args:
        timeout: seconds between two signs of life of a server.
        connections: number of connections at most; None: any number.
        url: of all requests.
    """

    def __init__(self, tls: ssl.SSLContext, timeout: float, connections: int | None = None, url: str = "") -> None:
        tls.sslsocket_class = _TimedSocket
        pool = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=None)
        self.timeout, self.url = timeout, url
        self.http = httpx.Client(base_url=url, transport=WayOut(tls, pool), trust_env=False)
        for name in ("accept", "user-agent", "connection"):
            del self.http.headers[name]
        self.http.headers["accept-encoding"] = "identity"  # what was unpacked could have any size

    def ask(
        self, method: str, path: str, most: int, *, content: bytes | None = None, wait: float = 0.0,
        seconds: float | None = None, check: Callable[[Any], object] = id, **request: Any,
    ) -> HttpAnswer:  # fmt: skip
        """The answer to a request, whose `headers` may be given.

        Args:
            most: bytes of an answer that is no refusal.
            wait: seconds for which the server may wait before it answers.
            seconds: for the whole; None: `timeout` and `wait`, and a second for each `SLOWEST` bytes of both ways.
            check: is given the connection before anything of the answer's body is read.

        Raises:
            httpx.TransportError: there is no answer in time, or it is not one of HTTP.
            AnswerError: it has more than `most` bytes, or an encoding that was not asked for.
        """
        seconds = seconds or self.timeout + wait + (most + len(content or b"")) / SLOWEST
        token = _end.set(time.monotonic() + seconds)
        timeouts = httpx.Timeout(self.timeout + wait, connect=CONNECT)
        body, where = bytearray(), path.partition("?")[0]
        try:
            with self.http.stream(method, path, content=content, timeout=timeouts, **request) as answer:
                check(answer.extensions["network_stream"].get_extra_info("socket"))
                if answer.headers.get("content-encoding", "identity").lower() != "identity":
                    raise AnswerError(f"the answer to {where} is packed, as nobody has asked for")
                most = most if answer.status_code in DONE else REFUSAL
                for part in answer.iter_raw():
                    body += part
                    if len(body) > most:
                        raise AnswerError(f"the answer to {where} has more than {most:,} bytes")
                return HttpAnswer(answer.status_code, bytes(body), answer.headers.get("date", ""))
        finally:
            _end.reset(token)

    def close(self) -> None:
        self.http.close()
