"""A service of the network layer in a process of its own: `python -m tests.network.services KIND FOLDER`.

Whoever starts it sets times that a test can wait for; sizes and numbers are those of limits.py.
"""

import sys
import time
from pathlib import Path

from fedkseed.network import limits
from fedkseed.network.http_server import listen, serve_locally
from fedkseed.network.https import server
from fedkseed.network.https.connections import Connections
from fedkseed.network.peers import FILE, tls
from fedkseed.network.peers.app import application, serving_uploads
from fedkseed.network.peers.store import UploadStore
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.signatures import Audiences, private_key
from fedkseed.report.watch_page import RunPage

from .peers.synthetic import ROUNDS, Federation
from .ports import free_port

LARGEST = 1_000_000_000  # bytes of a reply, as with fedavg


def https(folder: Path) -> None:
    """The server of `serve` and `shard`, with two clients."""
    keys, port = folder / "keys", free_port()
    make(keys, 2, ["localhost"], 2)
    connections = Connections(
        Audiences.of(keys), [private_key(keys / f"client-{number}").public_key() for number in range(2)]
    )
    with server.listening(connections, server.Address("127.0.0.1", port), LARGEST, keys):
        print(port, flush=True)
        time.sleep(600)


def peers(folder: Path) -> None:
    """The server of `peer`, number 0 of five, whose certificates are in the folder."""
    files, port = (folder / "0.key", folder / "client-0.pem", folder / "ca.pem"), free_port()
    context, _ = tls.contexts(*files, folder)
    store = UploadStore(folder / FILE, Federation.of().rule)
    app = application(store, lambda: ROUNDS, 1 << 16, int)
    with serving_uploads(app, store, "127.0.0.1", port, context):
        print(port, flush=True)
        time.sleep(600)


def page(folder: Path) -> None:
    """The server of `watch --serve`, and but for the application that of `serve-model`."""
    at = listen("127.0.0.1", 0)
    serve_locally(RunPage(folder), at, "127.0.0.1", "", lambda: print(at.getsockname()[1], flush=True))


if __name__ == "__main__":
    limits.HEADER_SECONDS = limits.PATIENCE = limits.LINGER = 1.0
    globals()[sys.argv[1]](Path(sys.argv[2]))
