"""The history of a run as a client knows it: a log that the server can add to and never change.

With each task come a head of the run's chain (run/digest_chain.py) and the links since the last round that the server
knows the client to have seen. The client computes the head from the one that it has kept, and refuses another: a server
that has changed a round, left out an upload afterwards, gone back in silence, or shows its clients different runs has
to show one of them two histories. The client signs the head with its upload, so that whoever has the signed uploads of
two clients can prove it (`fedkseed verify`). A server that goes back by `fedkseed rollback` begins another history,
with another nonce, and clients can see in their files that it did.

The last link is made of the broadcast, too. So a round of a run has one broadcast, for all clients and each time that
one of them is asked. A client has one number and one recipe in a run. All of that is kept in its file, so that a worker
which is started again knows it.
"""

from dataclasses import astuple, dataclass
from operator import index
from pathlib import Path

from ...errors import FedKSeedError
from ...files import read_table, write_table
from ...run import digest_chain as chain
from .envelope import LINK, Task

HISTORY_FILE = "history.json"  # in the directory of a client
MOST_RUNS = 256  # of one server of which a client keeps the history: 95 KB; it could have it write without end, else


@dataclass(frozen=True, slots=True)
class SeenRun:
    """The last that a client has seen of one run."""

    done: int  # rounds
    head: bytes  # after them
    link: bytes  # the last one
    client: int  # number of the client in the run
    recipe: bytes  # digest of the recipe of the run
    server: bytes = b""  # whose run it is; empty in files of older releases


class RunHistory:
    """The last head that a client knows of each run, in its directory.

    None is forgotten: a server could have a run driven out by made-up ones, and ask for its rounds with other models.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / HISTORY_FILE
        self._runs = read_history(self.path) if self.path.exists() else {}

    def follow(self, task: Task, server: bytes = b"") -> bool:
        """Check a task's history against the one that is known, and keep its head.

        Args:
            server: that has signed the task, by its audience; it can't use up the room of another.

        Returns:
            Whether the task has the links that are needed; else the server has to send all of them.

        Raises:
            FedKSeedError: the task's history is another than the one that is known, or it is for another number or
                with another recipe than the run's tasks before, or of a run for which there is no room.
        """
        links = [task.links[at : at + LINK] for at in range(0, len(task.links), LINK)]
        known = self._runs.get(task.nonce.hex())
        if known is None and sum(seen.server == server for seen in self._runs.values()) >= MOST_RUNS:
            raise FedKSeedError(
                f"{self.path} has {MOST_RUNS} runs of this server, no more of it are followed: ask its owner why, "
                "or go on with another key and --state; what rows have spent of epsilon stays counted"
            )
        at, head, link = (known.done, known.head, known.link) if known else (-1, None, b"")
        if known is not None and task.client != known.client:  # other batches, directions
            raise FedKSeedError(f"this client is {known.client} in this run, and the task is for {task.client}")
        if known is not None and task.digest != known.recipe:
            raise FedKSeedError(
                f"this run began with a recipe of digest {known.recipe.hex()}, and the task is for one of "
                f"{task.digest.hex()}: a run has one recipe; {self.path} has what was seen"
            )
        if task.done < at:
            raise FedKSeedError(f"the server is back at round {task.done}, this client has seen the state after {at}")
        if task.since > at + 1:
            return False
        for link in links[at + 1 - task.since :]:
            head = chain.head(head, link)
        if head != task.head:
            raise FedKSeedError(
                f"the run's history up to round {task.done} is another than the one that this client saw up to {at}: "
                f"the server has changed it, or shows its clients different ones; {self.path} has what was seen"
            )
        if task.done > at and head is not None:
            self._runs[task.nonce.hex()] = SeenRun(task.done, head, link, task.client, task.digest, server)
            texts = {nonce: astuple(seen) for nonce, seen in self._runs.items()}
            write_table(self.path, {k: [x.hex() if isinstance(x, bytes) else x for x in t] for k, t in texts.items()})
        return True

    def require_bound(self, task: Task, broadcast: bytes) -> None:
        """Refuse a broadcast that is not the one in the history of its task, which was followed.

        Args:
            broadcast: SHA-256 of the whole message with which the client would train.

        Raises:
            FedKSeedError: it is another.
        """
        known = self._runs.get(task.nonce.hex())
        if known is None or known.done != task.done or known.link != chain.link(task.stem, broadcast):
            raise FedKSeedError(
                f"the broadcast of round {task.done + 1} is not the one in the run's history: the server asks with "
                f"different ones, or its history is made up; {self.path} has what was seen"
            )


def read_history(path: Path) -> dict[str, SeenRun]:
    """The last that a client has seen of each run: by its nonce, hexadecimal.

    Raises:
        FedKSeedError: the file can't be read, or is no such table.
    """
    table, fromhex = read_table(path), bytes.fromhex
    try:
        return {
            nonce: SeenRun(index(done), fromhex(head), fromhex(link), index(client), *map(fromhex, rest))
            for nonce, (done, head, link, client, *rest) in table.items()
        }
    except (ValueError, TypeError) as error:
        raise FedKSeedError(f"{path} holds no history of a client: {error}") from error
