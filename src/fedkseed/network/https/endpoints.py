"""The two ends of an HTTPS connection, as servers, clients and peers of a federation set them up."""

import resource
import socket
import ssl
import threading
import time
from asyncio import sslproto
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from ...errors import FedKSeedError
from ...files import border

TLS_BUFFER = 1 << 13  # bytes read of a connection at once; asyncio keeps 256 KB for each, 5 GB for 20,000 clients
START = 30.0  # seconds for the port to be open, and for the server to end after its connections
LINGER = 3.0  # seconds for connections to end by themselves; uvicorn's patience is longer
KEEP_ALIVE = 300  # seconds for which a connection without a request is kept; a request waits up to 240


def server_context(keys: Path) -> ssl.SSLContext:
    """The TLS of a server.

    Args:
        keys: folder with server.pem and server.key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    return context


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
    with border(f"can't listen on port {port} of {host}"):
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
    bytes.

    Args:
        timeout: seconds between two signs of life of a server.
        connections: number of connections at most; None: any number.
        url: of all its requests.
    """
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=None)
    client = httpx.Client(base_url=url, verify=tls, limits=limits, timeout=timeout, trust_env=False)
    for name in ("accept", "accept-encoding", "user-agent", "connection"):
        del client.headers[name]
    return client
