"""Flower's program `flower-superlink`, in which clients can do no more than answer what they were sent.

python -m fedkseed.network.flower.server.superlink LARGEST NOTICES ARGUMENT…

LARGEST is the number of bytes of the largest request of a client, NOTICES a file for what whoever runs the server
should know of: one JSON object a line, with a `node` and a `text`. Its writers are this process alone: in Flower's log,
texts of clients stand beside those of Flower.
"""

import json
import sys
from pathlib import Path

from ...protocol.server.request_limits import ClientAddresses, Quota
from ..compat import guard_fleet

HOUR = 1 / 3600  # notices of one kind about one client, a second


class Notices:
    """Notices about keys that seem to be in two hands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refusals, self._moves = Quota(HOUR, 1), Quota(HOUR, 1)
        self._addresses = ClientAddresses()

    def refused(self, node: int) -> None:
        """Take note of a node that wanted to connect while it is connected."""
        if self._refusals.takes(node):
            self._write(
                node,
                "wanted to connect while it is connected: it was killed and is back within a minute, or somebody else "
                "has its key",
            )

    def seen(self, node: int, address: str) -> None:
        """Take note of the address from which a node's key was used."""
        other = self._addresses.other(node, address)
        if other is not None and self._moves.takes(node):
            self._write(
                node,
                f"uses its key from {address} and {other} in turn: its network has two ways out, or somebody else has "
                "its key",
            )

    def _write(self, node: int, text: str) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"node": node, "text": text}) + "\n")


def main() -> None:
    """Serve clients until this process is ended."""
    largest, path = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    notices = Notices(path)
    guard_fleet(largest, Quota().takes, notices.seen, notices.refused)
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()
