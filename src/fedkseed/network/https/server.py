"""A server over HTTPS: requests on a thread of their own, rounds on the caller's, keys looked at every two seconds.

One process, and one port with five requests (app.py), none of which starts anything. All state is the run's: a server
that was killed is started again by the same command, and goes on from the last finished round.
"""

import resource
import socket
import ssl
import threading
import time
from asyncio import sslproto
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ...errors import FedKSeedError
from ...files import border, exclusive, read_table
from ...recipe.schema import Recipe
from ...run.loop import Result
from ...run.progress import Progress
from ...run.store import Store
from ..protocol import certs
from ..protocol.addresses import disk_of
from ..protocol.carrier import Parcel
from ..protocol.networked_recipe import largest_request
from ..protocol.server.client_numbers import ClientNumbers
from ..protocol.server.request_limits import Quota
from ..protocol.server.serving import serve
from ..protocol.signatures import SIGNING, ServerSigning, public_key
from .app import application
from .browser_page import Page
from .connections import Connections, RequestError

FOLDER = "https"  # in a run's directory
KEYS = 2.0  # seconds between two looks at the clients' keys
BUFFER = 1 << 13  # bytes that are read of a connection at once; asyncio keeps 256 KB for each, 5 GB for 20,000 clients
START = 30.0  # seconds for the port to be open
ENDING = 3.0  # seconds for connections to end by themselves; uvicorn's patience is longer
KEPT = 300  # seconds for which a connection without a request is kept; a request waits up to 240


class RekeyedError(BaseException):
    """The end of an attempt at a run because clients have other keys; not an error of the carrier's, which would be
    tried again.
    """


class Registry:
    """The clients' keys in the directory of `fedkseed certs`; their order decides the clients' numbers.

    A key that was removed or replaced is refused from then on, and can't come back. A run that has begun goes on with
    the number of clients that it began with.
    """

    first = 0  # number in the run of the client whose key is client-0.pub

    def __init__(self, directory: Path, keys: Path, progress: Progress) -> None:
        self.directory, self.keys, self.progress = directory, keys, progress
        self._seen: dict[str, tuple[int, int]] = {}  # the last that was looked at, taken or not
        self._taken: dict[str, tuple[int, int]] = {}
        self.times = 0  # that keys were taken
        self.lines: list[str] = []  # those taken, by number
        self._looked = 0.0

    def changed(self) -> bool:
        """True if files of keys have changed since they were taken; looks at most every two seconds."""
        now = time.monotonic()
        if now - self._looked < KEYS:
            return False
        self._looked = now
        return self._files() != self._seen

    def has(self, client: int) -> bool:
        """True if a client's file is as it was taken: a key that was removed has no more requests from then on."""
        name = f"client-{client - self.first}.pub"
        try:
            stat = (self.keys / name).stat()
        except OSError:
            return False
        return self._taken.get(name) == (stat.st_mtime_ns, stat.st_size)

    def wait_for(self, count: int) -> None:
        """Wait for a number of keys: those of browsers are made on the page, once it is served."""
        known = -1
        while (have := len(self._files())) < count:
            if have != known:
                self.progress.note(f"{have} of {count} clients have a key in {self.keys}: waiting for more")
            known = have
            time.sleep(KEYS)

    def take(self) -> list[str]:
        """Write down the keys as they are now, and return the line of each client; empty for one without.

        Raises:
            FedKSeedError: two clients have one key, or one has a key that was revoked.
        """
        self._seen = self._files()
        paths = self._paths()
        lines = [path.read_text().strip() if path.exists() else "" for path in paths]
        paths, lines = [self.keys] * self.first + paths, [""] * self.first + lines
        given = [tuple(line.split()[:2]) for line in lines if line]
        if len({*given}) < len(given):
            raise FedKSeedError(f"two clients of {self.keys} have the same key; each needs one of its own")
        folder = self.directory / FOLDER
        if (folder / SIGNING).exists():
            table = read_table(folder / SIGNING)
            revoked = {old for former in table["former"] for old in former}
            for number, line in enumerate(lines):
                if line and line in revoked:
                    raise FedKSeedError(
                        f"the key {paths[number]} was revoked, and can't come back; make another for client {number}"
                    )
        self.lines = lines
        lacking = [number for number, line in enumerate(lines) if not line]
        ClientNumbers.register(self.directory, range(len(lines)), lacking)
        ServerSigning.write(folder, self.keys, lines)
        self._taken, self.times = self._seen, self.times + 1
        return lines

    def _paths(self) -> list[Path]:
        """The file of each client, by number; those of a run that has begun may be missing."""
        known = ClientNumbers.registered(self.directory) if Store(self.directory).begun else 0
        if not known:
            return certs.public_keys(self.keys)
        if len(self._seen) > known:
            self.progress.note(f"the run began with {known} clients; those that have come since take part in new runs")
        return [self.keys / f"client-{number}.pub" for number in range(known)]

    def _files(self) -> dict[str, tuple[int, int]]:
        found = {path.name: path.stat() for path in self.keys.glob("client-*.pub")}
        return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


class Watching(Connections):
    """A hub that looks at the clients' keys: at all while the rounds wait, at a client's own with each request."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(())
        self.registry = registry

    def renew(self) -> None:
        """Take the keys as they are now."""
        lines = self.registry.take()
        self.take(
            [public_key(line.encode(), f"the key of client {n}") if line else None for n, line in enumerate(lines)]
        )

    def session(self, proof: bytes) -> tuple[int, str]:
        number, token = super().session(proof)
        return self._with_key(number), token

    def client(self, token: str) -> int:
        return self._with_key(super().client(token))

    def _with_key(self, client: int) -> int:
        if not self.registry.has(client):
            raise RequestError(403, "the key is not registered any more")
        return client

    def nodes(self) -> list[int]:
        self.look()
        return super().nodes()

    def send(self, parcels: Sequence[Parcel]) -> list[str | None]:
        self.look()
        return super().send(parcels)

    def look(self) -> None:
        """Pass on what the requests' thread has noted, and take keys that have changed.

        Raises:
            RekeyedError: they were taken.
        """
        while self.notices:
            self.registry.progress.note(self.notices.popleft())
        if self.registry.changed():
            try:
                self.renew()
            except (FedKSeedError, OSError) as error:  # half written, too: it is read again when it is whole
                self.registry.progress.note(f"the keys in {self.registry.keys} can't be taken up: {error}")
            else:
                raise RekeyedError


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on.

    Args:
        tls: whether this process has the certificate, or a proxy on this machine.
        strangers: requests without a session that one address may send, a second.
        page: for clients in browsers, if it is served.
    """

    host: str
    port: int
    tls: bool = True
    strangers: float = 50.0
    page: Page | None = None


@contextmanager
def listening(hub: Connections, address: Address, largest: int, keys: Path) -> Iterator[None]:
    """Answer requests on a thread of their own for the length of a `with` block.

    Args:
        largest: bytes of the largest reply.
        keys: directory with server.pem and server.key.

    Raises:
        FedKSeedError: the port is taken.
    """
    host, port = address.host, address.port
    sslproto.SSLProtocol.max_size = BUFFER
    many = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each client has one connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (many, many))
    quota = Quota(address.strangers, 8 * address.strangers)
    config = uvicorn.Config(
        application(hub, largest, quota, address.page), host=host, port=port, log_level="error",
        access_log=False, ws="none", lifespan="off", timeout_keep_alive=KEPT, server_header=False, date_header=False,
        timeout_graceful_shutdown=5, backlog=4096, proxy_headers=not address.tls,
        ssl_certfile=str(keys / "server.pem") if address.tls else None,
        ssl_keyfile=str(keys / "server.key") if address.tls else None,
    )  # fmt: skip
    config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    with answering(config):
        try:
            yield
        finally:
            hub.close()


@contextmanager
def answering(config: uvicorn.Config) -> Iterator[None]:
    """Answer requests, as uvicorn is configured, on a thread of their own for the length of a `with` block.

    Raises:
        FedKSeedError: the port is taken.
    """
    host, port = config.host, config.port
    server = uvicorn.Server(config)
    with border(f"can't listen on port {port} of {host}"):
        sockets = [_bound(host, port)]
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
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
        thread.join(ENDING)
        # Browsers answer the end of TLS on none of the connections that they keep for later.
        for connection in [*server.server_state.connections]:
            with suppress(RuntimeError):  # its loop has ended meanwhile
                connection.loop.call_soon_threadsafe(connection.transport.abort)
        thread.join(START)
        for one in sockets:
            one.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket of a port that nobody else has; uvicorn's own ends the process where the port is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def run(directory: Path, recipe: Recipe, keys: Path, address: Address, progress: Progress) -> Result:
    """Serve the remaining rounds of a run to clients over HTTPS.

    Args:
        recipe: of the run, whose [network] may have changed.
        keys: directory made by `fedkseed certs`.

    Raises:
        FedKSeedError: see `serving.serve`; or a certificate has expired, or the port is taken.
    """
    if warning := certs.check(keys):
        progress.note(warning)
    folder = directory / FOLDER
    with border(f"can't make {folder}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive(folder / "server.lock", f"another server works on {directory}; stop it first"):
        hub = Watching(Registry(directory, keys, progress))
        if address.page is None:
            hub.renew()  # a key that can't be taken ends the command before it listens
        Store(directory).change_recipe(recipe.to_toml())
        with listening(hub, address, largest_request(recipe), keys):
            progress.note(f"clients connect to port {address.port} of {address.host}")
            if address.page is not None:
                progress.note(f"clients in browsers open the same address: {address.page.offer}")
                hub.registry.wait_for(1 if recipe.clients.active is not None else recipe.clients.cohort)
                hub.renew()
            while True:
                try:
                    with disk_of(directory):
                        return serve(directory, hub, FOLDER, progress)
                except RekeyedError:
                    progress.note("clients have other keys; the run goes on from its last finished round")
