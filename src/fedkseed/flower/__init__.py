"""Rounds over a network, carried by Flower. Needs the extra `fedkseed[flower]`.

server_app.py    Flower's ServerApp: our loop over rounds, on a Grid
server.py        the federation of that loop
remote.py        clients behind a Grid, as the transport of a round
client_app.py    Flower's ClientApp: hands bytes to the worker, Flower starts a new process for each message
worker.py        keeps a client's model loaded, and answers
consent.py       what a client does by a server's wish, and what it refuses
task.py          what travels around a message
"""

from importlib.metadata import PackageNotFoundError, version

from ..errors import FedKSeedError

TESTED = ("1.41.",)  # Flower's own parties, too, must be of one minor version, or they refuse each other


def require_flower() -> None:
    """Refuse to go on without Flower, or with one that was not tested.

    Raises:
        FedKSeedError: it tells what to install.
    """
    install = "install it with: pip install 'fedkseed[flower]'"
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise FedKSeedError(f"a federation over a network needs Flower; {install}") from error
    if not found.startswith(TESTED):
        wanted = " or ".join(f"{prefix}*" for prefix in TESTED)
        raise FedKSeedError(f"Flower {found} is installed, fedkseed was tested with {wanted}; {install}")
