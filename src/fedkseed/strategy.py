"""The parts of a federated algorithm, and the settings that a recipe gives it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .directions import Pool
from .local.client import Client
from .local.work import LocalWork
from .wire.records import Run

# The two kinds of weights that a strategy's clients hold: functions w(c) of K coefficients, or any d numbers.
COEFFICIENTS, FULL = "coefficients", "full"

# Settings of a recipe that only some strategies take, as `ServerPart.reads` names them.
OPTIONAL = frozenset(
    {"[asynchronous]", "[clients] backpropagating", "[derivatives]", "[directions] shared", "[privacy]", "[secure]"}
    | {"[training] wire", "[training] server", "[trust]"}
)


@dataclass(frozen=True, slots=True)
class Trust:
    """Limits of what a client of a round can do to the sum: `[trust]` of a recipe."""

    rule: str = "mean"  # one of strategies/robust.py
    hostile: float = 0.2  # share of the clients that may be hostile, below a half
    agreement: bool = False  # whether clients count by how well they agree with the others: strategies/agreement.py
    most_examples: int | None = None  # largest weight of a client; 1: all count alike; None: what each claims
    warmup: int = 0  # first rounds, in which the server's step is shorter: there is little evidence about clients yet


@dataclass(frozen=True, slots=True)
class Masking:
    """Secure aggregation: `[secure]` of a recipe, and the keys of its clients."""

    norm: float | None  # this and the next, see `Grid` in fedkseed.secure
    bits: int = 8
    neighbours: int | None = None  # see `MaskRoster` there
    keys: Mapping[int, bytes] = field(default_factory=dict)  # this and the next, see `Masks` in strategies/masked.py
    name: bytes = b""


@dataclass(frozen=True, slots=True)
class Noise:
    """Differential privacy of clients: `[privacy]` of a recipe with the noise that follows from it."""

    multiplier: float  # standard deviation of the noise on a round's sum over the most that one client changes it
    norm: float = 0.0  # largest norm of a client's change, for a server that adds the noise
    colluding: float = 0.0  # share of a cohort that may tell the server its own noise
    scale: float = 1.0  # size of a cohort over that of the federation that [privacy] simulated names; else 1
    secret: bytes = field(default=b"", repr=False)  # of the server's noise; empty where it adds none


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a recipe sets for an algorithm; a server takes those settings that it `reads`.

    Args:
        run: the pool that messages are for, and the base model.
        local: settings of a client's local steps.
        derivatives: settings of the local steps, in R^K, of clients that take derivatives; None: no such clients.
        start: the tuned weights before the first round, shape (d,), for a server that holds them; else empty.
        tensors: number and size of each tuned tensor; empty on a server without a model.
        pool: the recipe's K directions, where the run's pool is another; None: it is the run's.
        wire: the precision of numbers that travel, see wire/numbers.py; None: the strategy's own default.
        server, server_lr: the optimiser that the server applies to the mean update, and its rate: c ← c + η_s Δ, or an
            optimiser's step with −Δ in place of a gradient (Reddi et al., 2021).
        max_staleness: the largest number of rounds since a client began; 0: all clients of a round begin with it.
        staleness_power: an upload that is s rounds old counts (1 + s)^−power times as much as a new one.
        trust: limits of what a client can do to a round's sum.
        shared: whether all clients of a round draw the same directions.
        secure: settings of secure aggregation; None: the server sees each upload.
        noise: differential privacy of clients; None: no noise on sums.
    """

    run: Run
    local: LocalWork
    derivatives: LocalWork | None = None
    start: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    tensors: tuple[tuple[int, int], ...] = ()
    pool: Pool | None = None
    wire: str | None = None
    server: str = "sgd"
    server_lr: float = 1.0
    max_staleness: int = 0
    staleness_power: float = 0.5
    trust: Trust = field(default_factory=Trust)
    shared: bool = False
    secure: Masking | None = None
    noise: Noise | None = None

    def work(self, differentiates: bool) -> LocalWork:
        """The local steps of a client that takes derivatives, or of one that does not."""
        return self.derivatives if differentiates and self.derivatives is not None else self.local


State = TypeVar("State")
NO_STATES: Mapping[int, Any] = MappingProxyType({})  # no client began in an earlier round


class ServerPart(Protocol[State]):
    """The part of a server that makes messages: the same one for all clients of a round.

    It holds settings only; its methods take a state. A state is a dataclass of `round`, the number of rounds done, and
    NumPy arrays.

    The rules of recipes (recipe/rules.py) read the class attributes. A server with options for which the sum of a
    round's changes is not enough names them in a further one, `needs_single_uploads`.
    """

    state: ClassVar[type[Any]]  # the class of its states
    weights: ClassVar[str]  # COEFFICIENTS or FULL: what its clients hold
    remembers: ClassVar[bool]  # whether a client must remember the model of its last round
    reads: ClassVar[frozenset[str]]  # those of the OPTIONAL settings that it takes; others are refused

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> "Strategy[Any]":
        """The whole strategy that a recipe describes; options are those of its row in the table of algorithms."""
        ...

    def init(self) -> State: ...  # the state before the first round

    def broadcast(self, state: State) -> Any:
        """The message that tells a client the whole model of a state, whatever the client has seen before."""


class Aggregator(Protocol[State]):
    """The part of a server that adds up replies: a fold over them, whose value does not depend on their order.

    Replies are added one by one, as they come, so that nobody keeps those for whom a sum will do.
    """

    @property
    def replies(self) -> tuple[type[Any], ...]: ...  # the kinds of record that clients may send

    def start(self, state: State, sent: Mapping[int, Any], earlier_states: Mapping[int, State] = ...) -> Any:
        """The accumulator of a round to which nothing was added yet.

        Args:
            sent: the clients that may reply, with the message that each was sent.
            earlier_states: by round: the states with which the clients of older uploads began; of the present round,
                where clients began with another state than the one that is moved.
        """

    def add_(self, accumulator: Any, upload: Any) -> None:
        """Add an upload to the accumulator.

        Raises:
            FedKSeedError: the upload can't be used; the accumulator is as it was.
        """

    def finish(self, accumulator: Any) -> State:
        """The state after the round; it is an error if nothing was added, or no state can be made of it."""
        ...


class ClientPart(Protocol):
    """The part of a client: it loads the model of a message, takes its local steps and makes the upload."""

    message: ClassVar[type[Any]]  # the kind of record that comes down

    def sync(self, message: Any, weights: Any) -> None:
        """Give a client's weights the values of the global model."""

    def train(self, message: Any, client: Client[Any]) -> Any:
        """Take the local steps and return the upload."""

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator) -> Any:
        """An upload of the size of a client's, for measuring costs: random numbers in place of what training finds."""


@dataclass(frozen=True, slots=True)
class SecondLeg:
    """The second leg of a round: the server asks those whose uploads have come once more, before it can add them up."""

    request: type[Any]  # the kind of record that goes down
    answer: type[Any]  # and the one that comes up
    requests: Callable[[Any], Mapping[int, Any]]  # accumulator -> the message to each client whose upload was added
    add_: Callable[[Any, Any], None]  # adds an answer to the accumulator, or refuses it, as `Aggregator.add_`
    needed: Callable[[int], int]  # number of clients asked -> the least number of answers in each of both legs
    respond: Callable[[Any, Client[Any]], Any]  # a client's answer to a request


@dataclass(frozen=True, slots=True)
class Strategy(Generic[State]):
    """One federated algorithm: the two parts of its server, and that of its clients.

    docs/extending.md has a complete strategy of 40 lines. What changes a strategy puts another part in place of one.

    Args:
        addressed: where a client is sent more or less than the broadcast: maps a state, the cohort and a function that
            gives the encoded broadcast to the message of each client. None: all get the broadcast.
        second_leg: None: a client is asked once a round.
        sized: whether every upload has the size of the one that `ClientPart.example` makes.
        private: whether a report must say nothing of single uploads, as where noise protects their sum.
    """

    settings: Settings
    server: ServerPart[State]
    aggregator: Aggregator[State]
    client: ClientPart
    addressed: Callable[[State, Sequence[int], Callable[[], bytes]], Mapping[int, Any]] | None = None
    second_leg: SecondLeg | None = None
    sized: bool = True
    private: bool = False

    @property
    def run(self) -> Run:
        """The pool and the base model that messages must be for."""
        return self.settings.run

    def aggregate(self, state: State, uploads: Sequence[Any], earlier_states: Mapping[int, State] = NO_STATES) -> State:
        """The state after a round with these uploads, as in a round in which nobody else was asked."""
        accumulator = self.aggregator.start(state, dict.fromkeys(upload.client for upload in uploads), earlier_states)
        for upload in uploads:
            self.aggregator.add_(accumulator, upload)
        return self.aggregator.finish(accumulator)

    def load(self, state: State, weights: Any) -> None:
        """Give weights the values of the model of a state, as a client does that has seen no round."""
        self.client.sync(self.server.broadcast(state), weights)
