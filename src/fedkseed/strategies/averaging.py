"""Weights averaged: FedAvg and its kin, which differ in what is tuned and in the local steps.

FedAvg (McMahan et al., 2017), FedZO (Fang et al., 2022), FedMeZO, FedIT (Zhang et al., 2023), FedPTuning
and FedPrompt (Kuang et al., 2023) send weights both ways; with `uplink` = `pairs` clients send the
scalars of their zeroth-order steps instead (BAFFLE, Feng et al., 2023, and its kind).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..local.zeroth_order import zeroth_order_steps
from ..messages import Change, Run, Upload, Values
from ..randomness import draw_directions
from ..strategy import Client
from .common import (
    NONE,
    in_order,
    local_steps,
    merged,
    require_choice,
    require_scalars,
    require_sendable,
    require_settings,
    scheduled,
)

if TYPE_CHECKING:  # a server that averages needs no PyTorch
    from ..free import Free
    from ..weights import Weights


POINTS = {"one point": 1, "two points": 2}


@dataclass(frozen=True, slots=True)
class State:
    """The server holds the model."""

    round: int  # rounds done
    values: NDArray[np.float32]  # (d,)


@dataclass(frozen=True, slots=True)
class Averaging:
    """Clients start from the server's weights; the server averages what they end with.

    Args:
        run: the pool that zeroth-order steps draw from, and the base model.
        start: the tuned weights before the first round, shape (d,).
        tensors: the tuned tensors' numbers in the layout, and their sizes.
        local: `sgd`, `adam`, or zeroth-order steps with `one point` or `two points`.
        uplink: `weights`, or `pairs` of a direction and a scalar each.
        rounds: T, the length of the learning-rate schedule.
        steps: τ, local steps of a client in a round, unless `epochs` says how often it goes through its data.
        batch_size, lr, eps, schedule, probes, clip: as in `KSeed`.
    """

    message: ClassVar[type[Values]] = Values
    state: ClassVar[type[State]] = State

    run: Run
    start: NDArray[np.float32]
    tensors: tuple[tuple[int, int], ...]
    rounds: int
    local: str = "sgd"
    uplink: str = "weights"
    steps: int = 200
    epochs: int | None = None
    batch_size: int = 1
    lr: float = 3e-4
    eps: float = 5e-4
    schedule: str = "constant"
    probes: int = 1
    clip: float = math.inf

    def __post_init__(self) -> None:
        require_settings(self.schedule, rounds=self.rounds, steps=self.steps, probes=self.probes)
        require_choice("uplink", self.uplink, ("weights", "pairs"))
        require_choice("local", self.local, (*(("sgd", "adam") if self.uplink == "weights" else ()), *POINTS))

    @property
    def reply(self) -> type[Upload] | type[Change]:
        return Upload if self.uplink == "pairs" else Change

    @property
    def asked(self) -> int:
        return self.steps * self.probes if self.uplink == "pairs" else 0

    def init(self) -> State:
        return State(0, self.start)

    def broadcast(self, state: State, cohort: Sequence[int]) -> dict[int, Values]:
        lr = scheduled(self.lr, self.schedule, state.round, self.rounds)
        return dict.fromkeys(cohort, Values(self.run, state.round, lr, state.values))

    def sync(self, message: Values, weights: "Weights") -> None:
        cast("Free", weights).set(message.values)

    def train(self, message: Values, client: Client) -> Upload | Change:
        about = (self.run, message.round, client.number, client.examples)
        if self.local in ("sgd", "adam"):
            from ..local.first_order import train

            steps = local_steps(self.steps, self.epochs, client.examples, self.batch_size)
            found = train(client, message.round, optimizer=self.local, lr=message.lr, steps=steps)
            return Change(*about, found.loss, found.skipped, cast("Free", client.weights).values(), NONE)
        pool, pairs = self.run.pool, self.steps * self.probes
        found = zeroth_order_steps(
            client.weights,
            client.loss,
            client.batches(message.round),
            draw_directions(pool.key, message.round, client.number, pairs, pool.size, None),
            probes=self.probes,
            points=POINTS[self.local],
            lr=message.lr,
            eps=self.eps,
            clip=self.clip,
            on_step=client.on_step,
        )
        if self.uplink == "pairs":
            return Upload(*about, found.loss, found.directions, found.scalars)
        skipped = pairs - found.scalars.size
        return Change(*about, found.loss, skipped, cast("Free", client.weights).values(), NONE)

    def aggregate(self, state: State, uploads: Sequence[Upload] | Sequence[Change]) -> State:
        """w = Σ_i (n_i / n) w_i, n_i the examples of client i; of pairs, w ← w − η Σ_i (n_i / n) Σ ρ z_j / P.

        Raises:
            FedKSeedError: there is no upload, or one is of another round or run, of another size, or
                came twice, or a weight overflows; the state is unchanged.
        """
        if self.uplink == "pairs":
            return self._aggregate_pairs(state, cast("Sequence[Upload]", uploads))
        ordered = in_order(cast("Sequence[Change]", uploads), self.run, state.round)
        for upload in ordered:
            if upload.values.size != state.values.size:
                raise FedKSeedError(
                    f"client {upload.client} sent {upload.values.size} weights, the model has {state.values.size}"
                )
        total, mean = sum(upload.examples for upload in ordered), np.zeros_like(state.values)
        for upload in ordered:
            mean += np.float32(upload.examples / total) * upload.values
        require_sendable(state.round, mean)
        return State(state.round + 1, mean)

    def _aggregate_pairs(self, state: State, uploads: Sequence[Upload]) -> State:
        """The server makes the directions itself: the price of sending weights down and pairs up."""
        import torch

        from ..directions.operations import Piece, combine

        ordered = in_order(uploads, self.run, state.round)
        for upload in ordered:
            require_scalars(upload, self.asked, self.clip)
        lr = scheduled(self.lr, self.schedule, state.round, self.rounds) / self.probes
        directions, coefficients = merged(ordered, lr)
        values, start, pieces = torch.from_numpy(state.values.copy()), 0, []
        for number, size in self.tensors:
            part = values[start : start + size]
            pieces.append(Piece(number, part, part))
            start += size
        combine(pieces, self.run.pool, *self.run.pool.select(directions, coefficients))
        require_sendable(state.round, values.numpy())
        return State(state.round + 1, values.numpy())
