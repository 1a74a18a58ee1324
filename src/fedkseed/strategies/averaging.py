"""Averaging of weights: FedAvg and related algorithms, which differ in what is tuned and in the local steps.

FedAvg (McMahan et al., 2017), FedZO (Fang et al., 2022), FedMeZO, FedIT (Zhang et al., 2023), FedPTuning
and FedPrompt (Kuang et al., 2023) send weights both ways; with `uplink` = `scalars` clients send the
scalars of their zeroth-order steps instead (as in BAFFLE, Feng et al., 2023).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ..errors import require_choice
from ..local.client import Client
from ..randomness import draw_directions
from ..strategy import FULL, Settings, Strategy
from ..wire.numbers import scalars
from ..wire.records import Change, Upload, Values
from .checks import Arrivals, KeptUploads, merged, require_scalars, require_sendable, require_size
from .sums import HEAVIEST, WeightSum

if TYPE_CHECKING:  # a server that averages needs no PyTorch
    from ..weights.full import FullWeights


@dataclass(frozen=True, slots=True)
class AveragingState:
    """The server's state: the tuned weights of the model."""

    round: int  # rounds done
    values: NDArray[np.float32]  # (d,)


@dataclass(slots=True)
class WeightsSoFar:
    """The sum of the weights that have come in a round."""

    state: AveragingState  # before the round
    arrivals: Arrivals
    total: WeightSum


@dataclass(frozen=True, slots=True)
class Averaging:
    """The server of averages: clients start from its weights, and it averages those that they end with.

    Args:
        settings: its pool is the one that zeroth-order steps draw from.
        uplink: `weights`, or `scalars` of the zeroth-order steps.
    """

    state: ClassVar[type[AveragingState]] = AveragingState
    weights: ClassVar[str] = FULL
    remembers: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({"[privacy]"})
    needs_single_uploads: ClassVar[frozenset[tuple[str, object]]] = frozenset({("uplink", "scalars")})

    settings: Settings
    uplink: str = "weights"

    def __post_init__(self) -> None:
        uplinks = ("weights",) if self.settings.local.backpropagates else ("weights", "scalars")
        require_choice("uplink", self.uplink, uplinks)

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Strategy[AveragingState]:
        server = cls(settings, **options)
        return Strategy(settings, server, server, AveragingClient(settings, server.uplink))

    def init(self) -> AveragingState:
        return AveragingState(0, self.settings.start)

    def broadcast(self, state: AveragingState) -> Values:
        lr = self.settings.local.learning_rate(state.round)
        return Values(self.settings.run, state.round, lr, state.values)

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return (Upload if self.uplink == "scalars" else Change,)

    def start(
        self, state: AveragingState, sent: Mapping[int, Any], earlier_states: Any = None
    ) -> KeptUploads | WeightsSoFar:
        arrivals = Arrivals.of(self.settings.run, state, sent)
        if self.uplink == "scalars":
            return KeptUploads(state, arrivals)
        return WeightsSoFar(state, arrivals, WeightSum.zeros(state.values.size))

    def add_(self, accumulator: Any, upload: Upload | Change) -> None:
        """Add weights, which are not kept; scalars are few, and wait for the number of uploads, see `merged`."""
        arrivals = accumulator.arrivals
        arrivals.require(upload)
        if isinstance(upload, Upload):
            require_scalars(upload, self.settings.local.scalars, self.settings.local.clip)
            accumulator.keep_(upload)
            return
        require_size(upload, accumulator.state.values.size)
        most = HEAVIEST // len(arrivals.clients)  # no claim of one client must make the sum of all too large
        accumulator.total.add_(upload.client, min(upload.examples, most), upload.values)
        arrivals.note_(upload)

    def finish(self, accumulator: KeptUploads | WeightsSoFar) -> AveragingState:
        """The state after averaging: of weights, w = Σ_i (n_i / n) w_i, n_i the examples of client i.

        Of scalars, w ← w − η Σ_i (n_i / n) Σ ρ z_j / P.
        """
        state = accumulator.state
        accumulator.arrivals.require_any()
        scalars_came = isinstance(accumulator, KeptUploads)
        values = self._moved(state, accumulator.in_order()) if scalars_came else accumulator.total.mean()
        require_sendable(state.round, values)
        return AveragingState(state.round + 1, values)

    def _moved(self, state: AveragingState, uploads: list[Upload]) -> NDArray[np.float32]:
        """The weights moved by clients' scalars; the server makes the directions, the price of scalars up."""
        import torch

        from ..directions.operations import DirectionSum, Piece

        pool, local = self.settings.run.pool, self.settings.local
        directions, coefficients = merged(uploads, self.settings.run, local.learning_rate(state.round) / local.probes)
        values, tensors = torch.from_numpy(state.values.copy()), self.settings.tensors
        parts = values.split([size for _, size in tensors])
        pieces = [Piece(number, part, part) for (number, _), part in zip(tensors, parts, strict=True)]
        DirectionSum(pool, *pool.select(directions, coefficients)).combine(pieces)
        return values.numpy()

    def change(self, state: AveragingState, upload: Change) -> NDArray[np.float64]:
        """The change of the weights that an upload stands for, shape (d,)."""
        require_size(upload, state.values.size)
        return upload.values.astype(np.float64) - state.values

    def stepped(self, state: AveragingState, gradient: NDArray[np.float64]) -> AveragingState:
        """The state after w ← w − gradient."""
        values = (state.values - gradient).astype(np.float32)
        require_sendable(state.round, values)
        return AveragingState(state.round + 1, values)


@dataclass(frozen=True, slots=True)
class AveragingClient:
    """A client's part: the weights come down, and those after its steps go up, or its scalars."""

    message: ClassVar[type[Values]] = Values

    settings: Settings
    uplink: str

    def sync(self, message: Values, weights: "FullWeights") -> None:
        weights.set(message.values)

    def train(self, message: Values, client: "Client[FullWeights]") -> Upload | Change:
        local, pool = self.settings.local, self.settings.run.pool
        about = (self.settings.run, message.round, client.number, client.examples)
        if local.backpropagates:
            trained = local.first_order(client, message.round, message.lr)
            return Change(*about, trained.loss, trained.skipped, client.weights.values())
        directions = draw_directions(pool.key, message.round, client.number, local.scalars, pool.size, None)
        steps = local.zeroth_order(client, message.round, message.lr, directions)
        if self.uplink == "scalars":
            return Upload(*about, steps.loss, steps.scalars)
        return Change(*about, steps.loss, steps.skipped, client.weights.values())

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: Generator) -> Upload | Change:
        about = (self.settings.run, round_, client, examples, 1.0)
        if self.uplink == "scalars":
            return Upload(*about, scalars(rng.normal(size=self.settings.local.scalars)))
        return Change(*about, 0, self.settings.start)
