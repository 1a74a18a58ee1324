"""Flower's `flwr-clientapp`, with our ClientApp in place of the one that the server sends.

A SuperNode runs whatever app a server's run brings: whoever has the server could run anything on the clients. A
client of `fedkseed client` finds this program first on its path, and runs nothing but the fedkseed that is installed.
"""

import sys
from importlib import import_module

from .app import app

# Where flwr 1.41 installs and loads an app.
MODULE, INSTALL, LOAD = "flwr.supernode.runtime.run_clientapp", "install_from_fab", "get_load_client_app_fn"


def main() -> None:
    """Answer one message."""
    theirs = import_module(MODULE)
    if not all(callable(getattr(theirs, name, None)) for name in (INSTALL, LOAD)):
        sys.exit(f"{MODULE} has no {INSTALL} or {LOAD}: this version of Flower was not tested, nothing is run")
    setattr(theirs, INSTALL, lambda *_, **__: None)
    setattr(theirs, LOAD, lambda *_, **__: lambda *_: app)
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


if __name__ == "__main__":
    main()
