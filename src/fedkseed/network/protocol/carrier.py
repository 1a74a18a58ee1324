"""The carriage of tasks to clients and of their replies: what the rounds of a server need of a transport."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

TRANSPORTS = ("flower", "https")  # folders of theirs in a run's directory

# Bytes of a task or of a reply. Flower keeps messages in SQLite, which takes no more; larger ones are refused
# before, so that the error names the reason.
MAX_MESSAGE = 1_000_000_000

# A client that is silent for a deadline / AGAIN is asked again: Flower forgets a message once it was asked for,
# and reports none that is lost on the way. The client's worker does no work twice.
AGAIN = 2

# Seconds by which a task outlives its deadline: Flower passes on neither a message whose time is over nor its
# answer, and the server could not say which clients are late.
LATE = 60.0


class RoundStoppedError(Exception):
    """A carrier's error that ends a round at once. After any other, its call is tried again."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A task on its way to a client."""

    node: int  # the transport's name of the client
    data: bytes  # an encoded `Task`
    round: int
    seconds: float  # after which it need not arrive any more


@dataclass(frozen=True, slots=True)
class Arrival:
    """A reply that has arrived, or the transport's reason why none will."""

    key: str  # of the parcel that it answers
    node: int  # by which it was sent
    data: bytes = b""  # an encoded `Reply`, unless there is a reason
    trouble: str | None = None  # the reason
    broken: str | None = None  # the defect of a reply that is none
    gone: bool = False  # whether the client has left


class Carrier(Protocol):
    """A transport. Each of its calls may fail, and is tried again, unless it raises `RoundStoppedError`."""

    name: str  # for people
    largest: int  # bytes of the largest parcel

    def nodes(self) -> list[int]: ...  # the clients that are connected now

    def dialled(self, node: int) -> str: ...  # the name by which a client has dialled the server; empty: none

    # A key for each; None: it was not taken. Parcels are made one by one: each may hold all weights.
    def send(self, parcels: Iterable[Parcel]) -> list[str | None]: ...

    # The replies that have come since the last call; of large ones some may wait for the next call.
    def arrived(self, keys: Collection[str]) -> list[Arrival]: ...
