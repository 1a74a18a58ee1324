"""Flower's `flwr-clientapp`, with our ClientApp in place of the one that the server sends.

A SuperNode runs whatever app a server's run brings: whoever has the server could run anything on the clients. A
client of `fedkseed client` finds this program first on its path, and runs nothing but the fedkseed that is installed.
"""

import sys

from ...errors import FedKSeedError
from ..compat import run_only
from .app import app


def main() -> None:
    """Answer one message."""
    try:
        run_only(app)
    except FedKSeedError as refusal:
        sys.exit(f"{refusal}, nothing is run")
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


if __name__ == "__main__":
    main()
