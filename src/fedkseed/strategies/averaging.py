"""Averaging of weights: FedAvg and related algorithms, which differ in what is tuned and in the local steps.

FedAvg (McMahan et al., 2017), FedZO (Fang et al., 2022), FedMeZO, FedIT (Zhang et al., 2023), FedPTuning
and FedPrompt (Kuang et al., 2023) send weights both ways; with `uplink` = `scalars` clients send the
scalars of their zeroth-order steps instead (as in BAFFLE, Feng et al., 2023).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..local.client import Client
from ..local.schedules import require_choice
from ..local.work import LocalWork
from ..randomness import draw_directions
from ..strategy import FULL, Settings
from ..wire.numbers import scalars
from ..wire.records import Change, Run, Upload, Values
from .checks import NEVER, NONE, in_order, merged, require_scalars, require_sendable

if TYPE_CHECKING:  # a server that averages needs no PyTorch
    from ..weights.full import FullWeights


@dataclass(frozen=True, slots=True)
class AveragingState:
    """The server's state: the tuned weights of the model."""

    round: int  # rounds done
    values: NDArray[np.float32]  # (d,)


@dataclass(frozen=True, slots=True)
class Averaging:
    """Averages of weights: clients start from the server's, and the server averages those that they end with.

    Args:
        run: the pool that zeroth-order steps draw from, and the base model.
        start: the tuned weights before the first round, shape (d,).
        tensors: the tuned tensors' numbers in the layout, and their sizes.
        local: settings of a client's local steps.
        uplink: `weights`, or `scalars` of the zeroth-order steps.
    """

    message: ClassVar[type[Values]] = Values
    state: ClassVar[type[AveragingState]] = AveragingState
    weights: ClassVar[str] = FULL
    remembers: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({"[privacy]"})
    needs_single_uploads: ClassVar[frozenset[tuple[str, object]]] = frozenset({("uplink", "scalars")})

    run: Run
    start: NDArray[np.float32]
    tensors: tuple[tuple[int, int], ...]
    local: LocalWork
    uplink: str = "weights"

    def __post_init__(self) -> None:
        require_choice("uplink", self.uplink, ("weights",) if self.local.backpropagates else ("weights", "scalars"))

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Self:
        return cls(settings.run, settings.start, settings.tensors, settings.local, **options)

    @property
    def sized(self) -> bool:
        return True

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return (Upload if self.uplink == "scalars" else Change,)

    def work(self, differentiates: bool) -> LocalWork:
        return self.local

    def init(self) -> AveragingState:
        return AveragingState(0, self.start)

    def broadcast(self, state: AveragingState, cohort: Sequence[int]) -> dict[int, Values]:
        message = Values(self.run, state.round, self.local.learning_rate(state.round), state.values)
        return dict.fromkeys(cohort, message)

    def sync(self, message: Values, weights: "FullWeights") -> None:
        weights.set(message.values)

    def train(self, message: Values, client: "Client[FullWeights]") -> Upload | Change:
        about = (self.run, message.round, client.number, client.examples)
        if self.local.backpropagates:
            trained = self.local.first_order(client, message.round, message.lr)
            return Change(*about, trained.loss, trained.skipped, client.weights.values(), NONE)
        pool, asked = self.run.pool, self.local.scalars
        directions = draw_directions(pool.key, message.round, client.number, asked, pool.size, None)
        found = self.local.zeroth_order(client, message.round, message.lr, directions)
        if self.uplink == "scalars":
            return Upload(*about, found.loss, found.scalars)
        return Change(*about, found.loss, found.skipped, client.weights.values(), NONE)

    def aggregate(
        self,
        state: AveragingState,
        uploads: Sequence[Upload] | Sequence[Change],
        earlier: Mapping[int, AveragingState] = NEVER,
    ) -> AveragingState:
        """The state after averaging: of weights, w = Σ_i (n_i / n) w_i, n_i the examples of client i.

        Of scalars, w ← w − η Σ_i (n_i / n) Σ ρ z_j / P.

        Raises:
            FedKSeedError: there is no upload, or one is of another round or run, of another size, or
                came twice, or a weight overflows; the state is unchanged.
        """
        if self.uplink == "scalars":
            return self._aggregate_scalars(state, cast("Sequence[Upload]", uploads))
        ordered = in_order(cast("Sequence[Change]", uploads), self.run, state.round)
        for upload in ordered:
            _require_size(upload, state)
        total, mean = sum(upload.examples for upload in ordered), np.zeros_like(state.values)
        part = np.empty_like(mean)
        for upload in ordered:
            mean += np.multiply(upload.values, np.float32(upload.examples / total), out=part)
        require_sendable(state.round, mean)
        return AveragingState(state.round + 1, mean)

    def checked_change(self, state: AveragingState, upload: Change) -> NDArray[np.float64]:
        """The change of the weights that an upload stands for, shape (d,).

        Raises:
            FedKSeedError: it has another number of weights than the model.
        """
        _require_size(upload, state)
        return upload.values.astype(np.float64) - state.values

    def stepped(self, state: AveragingState, gradient: NDArray[np.float64]) -> AveragingState:
        """The state after w ← w − gradient.

        Raises:
            FedKSeedError: a weight overflows.
        """
        values = (state.values - gradient).astype(np.float32)
        require_sendable(state.round, values)
        return AveragingState(state.round + 1, values)

    def example(
        self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator
    ) -> Upload | Change:
        about = (self.run, round_, client, examples, 1.0)
        if self.uplink == "scalars":
            return Upload(*about, scalars(rng.normal(size=self.local.scalars)))
        return Change(*about, 0, self.start, NONE)

    def _aggregate_scalars(self, state: AveragingState, uploads: Sequence[Upload]) -> AveragingState:
        """Apply clients' scalars; the server makes the directions, the price of sending weights down, scalars up."""
        import torch

        from ..directions.operations import Piece, combine

        ordered = in_order(uploads, self.run, state.round)
        for upload in ordered:
            require_scalars(upload, self.local.scalars, self.local.clip)
        lr = self.local.learning_rate(state.round) / self.local.probes
        directions, coefficients = merged(ordered, self.run, lr)
        values, start, pieces = torch.from_numpy(state.values.copy()), 0, []
        for number, size in self.tensors:
            part = values[start : start + size]
            pieces.append(Piece(number, part, part))
            start += size
        combine(pieces, self.run.pool, *self.run.pool.select(directions, coefficients))
        require_sendable(state.round, values.numpy())
        return AveragingState(state.round + 1, values.numpy())


def _require_size(upload: Change, state: AveragingState) -> None:
    if upload.values.size != state.values.size:
        raise FedKSeedError(
            f"client {upload.client} sent {upload.values.size} weights, the model has {state.values.size}"
        )
