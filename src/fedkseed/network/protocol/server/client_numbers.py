"""The map from a carrier's nodes to our numbers of clients, kept in a run's directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....errors import FedKSeedError
from ....files import read_table, write_table

NUMBERS = "clients.json"  # in a run's directory


class ClientNumbers:
    """The numbers of a run's clients.

    Where node keys are registered (`register`), they fix the numbers. Else nodes get numbers as they connect.

    Args:
        count: number of clients; None: that of the registered ones.
    """

    def __init__(self, directory: Path, count: int | None) -> None:
        self.path = directory / NUMBERS
        table = _read(self.path)
        self._clients: dict[int, int] = {int(node): number for node, number in table["nodes"].items()}
        self._fixed: bool = table["fixed"]
        registered = len(self._clients) if self._fixed else None
        if registered is None and count is None:
            raise FedKSeedError("how many clients are there? Set [clients] count, or register their keys")
        if None not in (registered, count) and registered != count:
            raise FedKSeedError(f"[clients] count says {count}, {registered} clients are registered")
        self.count: int = registered or count or 0
        self.expected = {*range(self.count)} - {*table["revoked"]}  # the others have no key any more

    @staticmethod
    def register(directory: Path, nodes: Sequence[int], revoked: Sequence[int] = ()) -> None:
        """Fix the numbers of a run's clients: 0 for the first node.

        Args:
            revoked: clients whose keys were revoked; nobody waits for them.
        """
        numbers = {node: number for number, node in enumerate(nodes)}
        write_table(directory / NUMBERS, {"fixed": True, "nodes": numbers, "revoked": list(revoked)})

    @staticmethod
    def registered(directory: Path) -> int:
        """Number of clients of a run that are registered."""
        table = _read(directory / NUMBERS)
        return len(table["nodes"]) if table["fixed"] else 0

    def clients_at(self, nodes: Sequence[int]) -> dict[int, int]:
        """Client -> node, for those of the given nodes that have a number or get one now."""
        fresh = [node for node in sorted(nodes) if node not in self._clients][: self.count - len(self._clients)]
        if fresh and not self._fixed:
            self._clients |= {node: number for number, node in enumerate(fresh, len(self._clients))}
            write_table(self.path, {"fixed": False, "nodes": self._clients, "revoked": []})
        return {self._clients[node]: node for node in nodes if node in self._clients}


def _read(path: Path) -> dict[str, Any]:
    return read_table(path) if path.exists() else {"nodes": {}, "fixed": False, "revoked": []}
