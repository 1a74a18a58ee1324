"""A client as algorithms see it: its model, its data, its loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .kept_steps import KeptSteps

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from torch import Tensor

    from ..secure.member import MaskingClient
    from ..weights.base import Weights
    from .private_steps import Private

Held = TypeVar("Held", bound="Weights")


@dataclass(frozen=True, slots=True)
class Client(Generic[Held]):
    """One client: its model, its data and its loss, none of which leave it."""

    number: int
    weights: Held
    examples: int  # number of examples that the client holds
    batches: Callable[[int], Iterator[Any]]  # round -> endless batches, the same for the same round
    loss: Callable[[Any], float]  # of one batch: nats a token, or another objective of the recipe
    on_step: Callable[[float], None] = lambda loss: None
    graph: "Callable[[Any], Tensor] | None" = None  # the loss with its graph, of a client that takes derivatives
    member: "MaskingClient | None" = None  # its keys, where uploads are masked
    private: "Private | None" = None  # the noise of its steps; batches then are lists of batches of one example
    kept: KeptSteps | None = None  # where its steps of a round are kept; None: a client that is stopped begins anew

    @property
    def claimed(self) -> int:
        """The number of examples that it reports: 1 where steps have noise, so that all clients count alike."""
        return self.examples if self.private is None else 1
