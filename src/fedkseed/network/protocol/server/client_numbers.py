"""The map from a carrier's nodes to our numbers of clients, kept in a run's directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ....errors import FedKSeedError
from ....files import read_table, write_table

NUMBERS = "clients.json"  # in a run's directory


class ClientNumbers:
    """The numbers of a run's clients.

    Where node keys are registered (`register`), they fix the numbers. Else nodes get numbers as they connect.

    Args:
        count: number of clients; default: the number of registered ones.

    Raises:
        FedKSeedError: there is neither a count nor a registered client, or the two numbers differ.
    """

    def __init__(self, directory: Path, count: int | None) -> None:
        self.path = directory / NUMBERS
        self._clients, self._fixed, revoked = _read(self.path)  # node -> client
        registered = len(self._clients) if self._fixed else None
        if registered is None and count is None:
            raise FedKSeedError("how many clients are there? Set [clients] count, or register their keys")
        if None not in (registered, count) and registered != count:
            raise FedKSeedError(f"[clients] count says {count}, {registered} clients are registered")
        self.count: int = registered or count or 0
        self.expected = {*range(self.count)} - {*revoked}  # the others have no key any more

    @staticmethod
    def register(directory: Path, nodes: Sequence[int], revoked: Sequence[int] = ()) -> None:
        """Fix the numbers of a run's clients: 0 for the first node.

        Args:
            revoked: clients whose keys were revoked; nobody waits for them.
        """
        _write(directory / NUMBERS, {node: number for number, node in enumerate(nodes)}, True, revoked)

    @staticmethod
    def registered(directory: Path) -> int:
        """Number of clients of a run that are registered."""
        return len(ClientNumbers.nodes(directory))

    @staticmethod
    def nodes(directory: Path) -> dict[int, int]:
        """Client -> node, for the registered clients of a run."""
        clients, fixed, _ = _read(directory / NUMBERS)
        return {client: node for node, client in clients.items()} if fixed else {}

    def clients_at(self, nodes: Sequence[int]) -> dict[int, int]:
        """Client -> node, for those of the given nodes that have a number or get one now."""
        fresh = [node for node in sorted(nodes) if node not in self._clients][: self.count - len(self._clients)]
        if fresh and not self._fixed:
            self._clients |= {node: number for number, node in enumerate(fresh, len(self._clients))}
            _write(self.path, self._clients, fixed=False)
        return {self._clients[node]: node for node in nodes if node in self._clients}


def _read(path: Path) -> tuple[dict[int, int], bool, list[int]]:
    """Node -> client, whether the numbers are fixed, and the clients without a key; empty if there is no file."""
    if not path.exists():
        return {}, False, []
    table = read_table(path)
    return {int(node): number for node, number in table["nodes"].items()}, table["fixed"], table["revoked"]


def _write(path: Path, clients: Mapping[int, int], fixed: bool, revoked: Sequence[int] = ()) -> None:
    write_table(path, {"fixed": fixed, "nodes": clients, "revoked": list(revoked)})
