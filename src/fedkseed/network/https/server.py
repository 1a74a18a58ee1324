"""A server over HTTPS: requests on a thread of their own, rounds on the caller's, changed keys taken up in between.

One process, and one port with six requests (app.py), none of which starts anything. All state is the run's: a server
that was killed is started again by the same command, and goes on from the last finished round.
"""

import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import FedKSeedError, others_border
from ...files import exclusive
from ...recipe.schema import Recipe
from ...run.loop import Result
from ...run.progress import Progress
from ...run.store import Store
from ..http_server import Crowd, listen, serving
from ..limits import Quota
from ..protocol import certs
from ..protocol.addresses import disk_of
from ..protocol.networked_recipe import largest_request
from ..protocol.server.serving import serve
from ..protocol.signatures import Audiences
from .app import application
from .browser_page import WEIGHTS, Page
from .connections import Connections
from .registered_keys import FOLDER, RekeyedError, keys_of_run


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on."""

    host: str
    port: int
    tls: bool = True  # whether this process has the certificate, or a proxy on this machine
    strangers: float = 50.0  # requests without a session that one address may send, a second
    page: Page | None = None  # for clients in browsers, if it is served


def run(directory: Path, recipe: Recipe, keys: Path, address: Address, progress: Progress) -> Result:
    """Serve the remaining rounds of a run to clients over HTTPS.

    Args:
        recipe: of the run, whose [network] may have changed.
        keys: directory made by `fedkseed certs`.

    Raises:
        FedKSeedError: see `serving.serve`; or a certificate has expired, or the port is taken.
    """
    registered = keys_of_run(directory, keys, progress)
    connections = Connections(Audiences.of(keys), (), has_key=registered.has)
    with alone_in(directory, keys, f"another server works on {directory}; stop it first", progress):
        if address.page is None:
            registered.take_up(connections)  # a key that can't be taken ends the command before it listens
            require_keys(recipe, len(registered.lines), keys)
        Store(directory).change_recipe(recipe.to_toml())
        with listening(connections, address, largest_request(recipe), keys, directory):
            progress.note(f"clients connect to port {address.port} of {address.host}")
            if address.page is not None:
                weights = address.page.files.get(WEIGHTS)
                offer = f"anybody gets the model of {weights}" if weights else "visitors need the model's files"
                progress.note(f"clients in browsers open the same address: {offer}")
                registered.wait_for(1 if recipe.clients.active is not None else recipe.clients.cohort)
                registered.take_up(connections)
            while True:
                try:
                    with disk_of(directory):
                        result = serve(
                            directory, connections, FOLDER, progress, partial(registered.stop_if_changed, connections)
                        )
                    connections.close(run_is_over=True)
                    return result
                except RekeyedError:
                    progress.note("clients have other keys; the run goes on from its last finished round")


def require_keys(recipe: Recipe, count: int, keys: Path) -> None:
    """Refuse a directory with fewer keys than a round has clients."""
    cohort = recipe.clients.cohort
    if count < cohort and recipe.clients.active is None and recipe.network.shards is None:
        remedy = f"take in those of more (`fedkseed certs add {keys} FILE.pub`), or lower cohort"
        raise FedKSeedError(f"[clients] cohort = {cohort}, and {keys} has the keys of {count} clients: {remedy}")


def own_tls(keys: Path) -> ssl.SSLContext:
    """The server's side of TLS; refuses a key that can't be read, or is not that of the certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    with others_border(f"{keys} has a server.pem and a server.key that can't be used", "remove both, and make others"):
        tls.load_cert_chain(keys / "server.pem", keys / "server.key")
    return tls


@contextmanager
def alone_in(directory: Path, keys: Path, taken: str, progress: Progress) -> Iterator[None]:
    """Check the server's certificate, and let no other server work in a directory for the length of a `with` block.

    Raises:
        FedKSeedError: the certificate is missing or has expired, or another server works there, as `taken` says.
    """
    if warning := certs.check(keys):
        progress.note(warning)
    with exclusive(directory / FOLDER / "server.lock", taken):
        yield


@contextmanager
def listening(
    connections: Connections, address: Address, largest: int, keys: Path, folder: Path | None = None
) -> Iterator[None]:
    """Answer the requests of clients for the length of a `with` block.

    Args:
        largest: bytes of the largest reply.
        keys: directory with server.pem and server.key.
        folder: see `application`.

    Raises:
        FedKSeedError: the port is taken.
    """
    tls = own_tls(keys) if address.tls else None
    burst = 8 * address.strangers  # requests at once, and connections
    app = application(connections, largest, Quota(address.strangers, burst), address.page, folder and str(folder))
    crowd = Crowd(int(burst)) if address.tls else None
    with serving(app, listen(address.host, address.port), tls, crowd, not address.tls), closing(connections):
        yield
