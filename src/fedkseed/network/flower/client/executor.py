"""Flower's program `flwr-clientapp`, with our ClientApp in place of the one that the server sends.

A SuperNode runs any app that a server's run contains, so whoever controls the server could run any code on the
clients. The SuperNode of `fedkseed client` finds this program first on its path, and runs the installed fedkseed alone.
"""

import sys

from ....errors import FedKSeedError
from ..compat import run_only, take_token
from .app import app


def main() -> None:
    """Answer one message with our ClientApp."""
    take_token()
    try:
        run_only(app)
    except FedKSeedError as refusal:
        sys.exit(f"{refusal}, nothing is run")
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


if __name__ == "__main__":
    main()
