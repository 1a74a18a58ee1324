"""The protocol of a federated algorithm, and the settings that a recipe gives it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .directions import Pool
from .local.client import Client
from .local.work import LocalWork
from .wire.records import Run

# The two kinds of weights that a strategy's clients hold: functions w(c) of K coefficients, or any d numbers.
COEFFICIENTS, FULL = "coefficients", "full"


@dataclass(frozen=True, slots=True)
class Trust:
    """Limits of what a client of a round can do to the sum: `[trust]` of a recipe.

    Args:
        rule: one of strategies/robust.py.
        hostile: share of the clients that may be hostile, below a half.
        agreement: whether clients count by how well they agree with the others, see strategies/agreement.py.
        most_examples: largest weight of a client; 1: all count alike; None: each claims its number of examples.
    """

    rule: str = "mean"
    hostile: float = 0.2
    agreement: bool = False
    most_examples: int | None = None

    def weight(self, examples: int) -> int:
        """The weight of a client that claims a number of examples."""
        return examples if self.most_examples is None else min(examples, self.most_examples)


@dataclass(frozen=True, slots=True)
class Masking:
    """Secure aggregation: `[secure]` of a recipe, and the keys of its clients.

    Args:
        norm, bits, neighbours: see `Grid` and `Roster` in fedkseed.secure.
        keys, name: see `Secure` in strategies/masked.py.
    """

    norm: float | None
    bits: int = 8
    neighbours: int | None = None
    keys: Mapping[int, bytes] = field(default_factory=dict)
    name: bytes = b""


@dataclass(frozen=True, slots=True)
class Noise:
    """Differential privacy of clients: `[privacy]` of a recipe with the noise that follows from it.

    Args:
        multiplier: standard deviation of the noise on a round's sum over the most that one client changes it.
        norm: largest norm of a client's change, for a server that adds the noise.
        colluding: share of a cohort that may tell the server its own noise.
        scale: clients of a round over those of the round that it stands for; 1, unless a simulation is of another.
        secret: of the server's noise; empty where it adds none.
    """

    multiplier: float
    norm: float = 0.0
    colluding: float = 0.0
    scale: float = 1.0
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a recipe sets for an algorithm; a strategy takes the settings that it `reads`.

    Args:
        run: the algorithm's own pool, and the base model.
        pool: the recipe's K directions; the same as the run's, where the model is a function of K coefficients.
        local: settings of a client's local steps.
        derivatives: settings of the local steps, in R^K, of clients that take derivatives; None: no such clients.
        start: the tuned weights before the first round, shape (d,), for a server that holds them; else empty.
        tensors: number and size of each tuned tensor; empty on a server without a model.
        wire: the precision of numbers that travel, see wire/numbers.py; None: the strategy's own default.
        server, server_lr: the optimiser that the server applies to the mean update, and its rate.
        max_staleness, staleness_power: see `KSeed`.
        trust: limits of what a client can do to a round's sum.
        shared: whether all clients of a round draw the same directions.
        secure: settings of secure aggregation; None: the server sees each upload.
        noise: differential privacy of clients; None: no noise on sums.
    """

    run: Run
    pool: Pool
    local: LocalWork
    derivatives: LocalWork | None = None
    start: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    tensors: tuple[tuple[int, int], ...] = ()
    wire: str | None = None
    server: str = "sgd"
    server_lr: float = 1.0
    max_staleness: int = 0
    staleness_power: float = 0.5
    trust: Trust = field(default_factory=Trust)
    shared: bool = False
    secure: Masking | None = None
    noise: Noise | None = None


State = TypeVar("State")


class Strategy(Protocol[State]):
    """One federated algorithm: the methods from `init` to `aggregate` stand in the order in which a run calls them.

    A strategy holds settings only; its methods take a state and return the next one. A state is a dataclass of `round`,
    the number of rounds done, and NumPy arrays. docs/extending.md has a complete strategy of 40 lines.

    The rules of recipes (recipe/rules.py) read the class attributes. A strategy with options for which the sum of a
    round's changes is not enough for a server names them in a further one, `needs_single_uploads`.
    """

    message: ClassVar[type[Any]]  # the kind of record that goes down
    state: ClassVar[type[Any]]  # the class of its states
    weights: ClassVar[str]  # COEFFICIENTS or FULL: what its clients hold
    remembers: ClassVar[bool]  # whether a client must remember the model of its last round
    reads: ClassVar[frozenset[str]]  # those of the OPTIONAL settings that it takes; others are refused

    @property
    def run(self) -> Run:
        """The pool and the base model that messages must be for."""
        ...

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Self:
        """The strategy that a recipe describes; options are those of its row in the table of algorithms."""
        ...

    @property
    def sized(self) -> bool:
        """Whether every reply has the size of the one that `example` makes."""
        ...

    @property
    def replies(self) -> tuple[type[Any], ...]:
        """The kinds of record that clients may send."""
        ...

    def work(self, differentiates: bool) -> LocalWork:
        """Settings of the local steps of a client that takes derivatives, or of one that does not."""
        ...

    def init(self) -> State:
        """The server's state before the first round."""
        ...

    def broadcast(self, state: State, cohort: Sequence[int]) -> Mapping[int, Any]:
        """The message to each client of this round; the same object for all where the message is the same."""
        ...

    def sync(self, message: Any, weights: Any) -> None:
        """Give a client's weights the values of the global model."""
        ...

    def train(self, message: Any, client: Client[Any]) -> Any:
        """Take the local steps and return the upload."""
        ...

    def aggregate(self, state: State, uploads: Sequence[Any], earlier: Mapping[int, State] = ...) -> State:
        """The state after the round; the order of the uploads makes no difference.

        Args:
            earlier: by round: the states with which the clients of older uploads began.
        """
        ...

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator) -> Any:
        """A reply of the size of a client's, for measuring costs: random numbers replace those that training finds."""
        ...


@runtime_checkable
class TwoLegs(Protocol):
    """A strategy whose rounds have a second leg: the server asks again those whose first answers have come."""

    request: ClassVar[type[Any]]  # the kind of record that goes down in the second leg
    answer: ClassVar[type[Any]]  # and up

    def requests(self, messages: Mapping[int, Any], uploads: Sequence[Any]) -> Mapping[int, Any]:
        """The second message to each client that has answered the first.

        Args:
            messages: those of the first leg, by client.
        """
        ...

    def needed(self, clients: int) -> int:
        """The least number of answers in each leg of a round of this many clients."""
        ...

    def require(self, client: int, sent: bytes, reply: bytes, uploads: Mapping[int, bytes]) -> None:
        """Refuse a client's answer in either leg that would spoil the round.

        Args:
            uploads: the answers of the first leg so far.
        """
        ...

    def respond(self, request: Any, client: Client[Any]) -> Any:
        """A client's answer to its second message."""
        ...

    def combined(self, messages: Mapping[int, Any], uploads: Sequence[Any], answers: Sequence[Any]) -> Any:
        """The record that `aggregate` takes in place of the uploads, from both legs' answers."""
        ...


# Settings of a recipe that only some strategies take, as `Strategy.reads` names them.
OPTIONAL = frozenset(
    {
        "[asynchronous]",
        "[clients] backpropagating",
        "[derivatives]",
        "[directions] shared",
        "[privacy]",
        "[secure]",
        "[training] wire",
        "[training] server",
        "[trust]",
    }
)
