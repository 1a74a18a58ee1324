"""The history of a run as a client knows it: a log that the server can add to and never change.

With each task come a head of the run's chain (run/chain.py) and the links since the last round that the server knows
the client to have seen. The client computes the head from the one that it has kept, and refuses another: a server that
has changed a round, left out an upload afterwards, gone back in silence, or shows its clients different runs has to
show one of them two histories. The client signs the head with its upload, so that whoever has the signed uploads of two
clients can prove it (`fedkseed verify`). A server that goes back by `fedkseed rollback` begins another history, with
another nonce, and clients can see in their files that it did.
"""

import operator
from pathlib import Path

from ..errors import FedKSeedError
from ..files import read_table, write_table
from ..run import chain
from .envelope import LINK, Task

KEPT = "history.json"  # in the directory of a client


class History:
    """The last head that a client knows of each run, in its directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / KEPT
        self._heads = seen(self.path) if self.path.exists() else {}

    def follow(self, task: Task) -> bool:
        """Check a task's history against the one that is known, and keep its head.

        Returns:
            Whether the task has the links that are needed; else the server has to send all of them.

        Raises:
            FedKSeedError: the task's history is another than the one that is known.
        """
        links = [task.links[at : at + LINK] for at in range(0, len(task.links), LINK)]
        done = task.since + len(links) - 1  # rounds in the state that the message is about
        at, head = self._heads.get(task.nonce.hex(), (-1, None))
        if done < at:
            raise FedKSeedError(f"the server is back at round {done}, this client has seen the state after {at}")
        if task.since > at + 1:
            return False
        for link in links[at + 1 - task.since :]:
            head = chain.head(head, link)
        if head != task.head:
            raise FedKSeedError(
                f"the run's history up to round {done} is another than the one that this client saw up to {at}: the "
                f"server has changed it, or shows its clients different ones; {self.path} has what was seen"
            )
        if done > at and head is not None:
            self._heads[task.nonce.hex()] = done, head
            table = {nonce: [rounds, known.hex()] for nonce, (rounds, known) in self._heads.items()}
            write_table(self.path, table)
        return True


def seen(path: Path) -> dict[str, tuple[int, bytes]]:
    """The last heads that a client has seen: by nonce of a run, hexadecimal, the rounds done and the head after them.

    Raises:
        FedKSeedError: the file can't be read, or is no such table.
    """
    table = read_table(path)
    try:
        return {nonce: (operator.index(rounds), bytes.fromhex(head)) for nonce, (rounds, head) in table.items()}
    except (ValueError, TypeError) as error:
        raise FedKSeedError(f"{path} holds no history of a client: {error}") from error
