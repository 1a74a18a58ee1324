"""What a federated algorithm is, and what a client brings to it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .messages import Broadcast, Upload

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from .weights import Weights


@dataclass(frozen=True, slots=True)
class Client:
    """One party: its model, its data, its loss. Nothing here leaves it."""

    number: int
    weights: "Weights"
    examples: int  # how many it holds
    batches: Callable[[int], Iterator[Any]]  # round -> endless batches, the same for the same round
    loss: Callable[[Any], float]  # of one batch, in nats a token
    on_step: Callable[[float], None] = lambda loss: None


State = TypeVar("State")


class Strategy(Protocol[State]):
    """One federated algorithm. Read the methods top to bottom: that is a round.

    A strategy holds settings only; state goes in and comes out.
    """

    def init(self) -> State:
        """The server's state before the first round."""
        ...

    def broadcast(self, state: State) -> Broadcast:
        """What every client of this round is sent."""
        ...

    def sync(self, message: Broadcast, client: Client) -> None:
        """Give the client's weights the values of the global model."""
        ...

    def train(self, message: Broadcast, client: Client) -> Upload:
        """Take the local steps and say what they found."""
        ...

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """The state after the round; the order of the uploads makes no difference."""
        ...
