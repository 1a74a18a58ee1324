"""What a federated algorithm is, and what a client brings to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from torch import Tensor

    from .weights.base import Weights


@dataclass(frozen=True, slots=True)
class Client:
    """One party: its model, its data, its loss. Nothing here leaves it."""

    number: int
    weights: "Weights"
    examples: int  # how many it holds
    batches: Callable[[int], Iterator[Any]]  # round -> endless batches, the same for the same round
    loss: Callable[[Any], float]  # of one batch: nats a token, or what else the recipe wants lowered
    on_step: Callable[[float], None] = lambda loss: None
    graph: "Callable[[Any], Tensor] | None" = None  # the loss with its graph, of a client that takes derivatives


State = TypeVar("State")


class Strategy(Protocol[State]):
    """One federated algorithm. Read the methods top to bottom: that is a round.

    A strategy holds settings only; state goes in and comes out. A state is a dataclass of `round`,
    the number of rounds done, and NumPy arrays.
    """

    message: ClassVar[type[Any]]  # the kind of record that goes down
    state: ClassVar[type[Any]]  # the class of its states

    @property
    def replies(self) -> tuple[type[Any], ...]:
        """The kinds of record that may come up."""
        ...

    def init(self) -> State:
        """The server's state before the first round."""
        ...

    def broadcast(self, state: State, cohort: Sequence[int]) -> Mapping[int, Any]:
        """What each client of this round is sent; one object, where it is the same for all."""
        ...

    def sync(self, message: Any, weights: "Weights") -> None:
        """Give a client's weights the values of the global model."""
        ...

    def train(self, message: Any, client: Client) -> Any:
        """Take the local steps and say what they found."""
        ...

    def aggregate(self, state: State, uploads: Sequence[Any], earlier: Mapping[int, State] = ...) -> State:
        """The state after the round; the order of the uploads makes no difference.

        Args:
            earlier: the states that clients of older uploads began with, by their rounds.
        """
        ...
