"""Rounds over a network, carried by Flower. Needs the extra `fedkseed[flower]`.

server/          a server's side: ServerApp, processes, the way to its clients
client/          a client's side: ClientApp, worker, processes, consent
envelope.py      what travels around a message
messages.py      bytes in Flower's messages
recipes.py       recipes over a network
children.py      Flower's programs, as children that end with their parent
certs.py cli.py  keys and certificates; the three commands
simulation.py    many virtual clients on Flower's own engine
strategy.py      our algorithms in a Flower project that is there already
loopback.py      a Grid in one process
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
