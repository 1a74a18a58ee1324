"""Zeroth-order steps: tuning with the memory of inference.

Malladi et al., 2023, https://arxiv.org/abs/2305.17333; Qin et al., 2024, Eq. 5 and 6;
Fang et al., 2022, https://arxiv.org/abs/2201.09531 (one point)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..wire.numbers import scalar
from .kept_steps import KeptSteps

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from ..weights.base import Weights

Batch = TypeVar("Batch", bound=Any)


@dataclass(frozen=True, slots=True)
class Steps:
    """Result of one client's local steps."""

    scalars: NDArray[np.float32]  # (τ P,), ρ; NaN where a probe moved nothing
    loss: float  # mean over the others; NaN if there is none

    @property
    def skipped(self) -> int:
        return int(np.isnan(self.scalars).sum())


def zeroth_order_steps(
    weights: "Weights",
    loss: Callable[[Batch], float],
    batches: Iterable[Batch],
    directions: NDArray[np.uint32],
    *,
    lr: float,
    eps: float,
    probes: int = 1,
    points: int = 2,
    clip: float = math.inf,
    wire: str = "exact",
    on_step: Callable[[float], None] = lambda loss: None,
    noised: Callable[[int, NDArray[np.float64]], NDArray[np.float64]] | None = None,
    kept: KeptSteps | None = None,
) -> Steps:
    """Take a step with every batch, along the mean of P = `probes` estimates, and end at the new weights.

    With two points ρ = [L(w + ε z_j) − L(w − ε z_j)] / 2ε; with one, ρ = [L(w + ε z_j) − L(w)] / ε, where
    L(w) is computed once a step. ρ is clipped to ±clip and rounded to what travels; once the P probes of a
    step are done, w ← w − η ρ z_j / P for each (c_j ← c_j − η ρ / P, where weights are w(c)). A probe
    whose loss is NaN or infinite moves nothing, and its ρ is NaN.

    Args:
        directions: j of every probe, shape (τ P,), step after step.
        wire: the precision of scalars that travel, see wire/numbers.py.
        points: 2, as MeZO and FedKSeed, or 1, as FedZO (its Eq. 4, on a batch of b1 examples with P = b2).
        noised: takes the number of a step and the ρ of each example, shape (B, P), and returns the P numbers that are
            used in place of their mean, see `Private`; a batch is then a sequence of batches of one example, and no
            loss is reported. None: no noise.
        kept: where the scalars so far are kept, and those of the same steps are taken up.
    """
    scalars = np.full(directions.size, np.nan, np.float32)
    losses: list[float] = []
    done = 0
    if kept is not None and (so_far := kept.read()):
        found, losses = so_far["scalars"], so_far["losses"].tolist()
        scalars[: found.size], done = found, found.size // probes
        for j, rho in zip(directions[: found.size].tolist(), found.tolist(), strict=True):
            if not math.isnan(rho):
                weights.move(j, -lr / probes * rho)
    for step, batch in islice(enumerate(batches), done, directions.size // probes):
        before, start = len(losses), step * probes
        along = directions[start : start + probes].tolist()
        if noised is None:
            rhos, means = _estimates(weights, partial(loss, batch), along, eps, points)
        else:
            rows, _ = _estimates(weights, partial(_each, loss, batch), along, eps, points)
            rhos, means = noised(step, np.stack(rows, 1)).tolist(), [math.nan] * probes
        for k, (j, rho, mean) in enumerate(zip(along, rhos, means, strict=True), start):
            scalars[k] = rounded = scalar(rho, clip, wire)  # a number of float32
            if not math.isnan(rounded):
                losses.append(mean)
                weights.move(j, -lr / probes * rounded)
        if kept is not None:
            kept.keep(scalars=scalars[: start + probes], losses=np.array(losses))
        on_step(mean_loss(losses[before:]))
    weights.settle()
    return Steps(scalars, mean_loss(losses))


def mean_loss(losses: Sequence[float]) -> float:
    """The mean of the losses of steps; NaN if there is none."""
    return sum(losses) / len(losses) if losses else math.nan


def _estimates(
    weights: "Weights", loss: Callable[[], Any], directions: Iterable[int], eps: float, points: int
) -> tuple[list[Any], list[Any]]:
    """ρ along each direction, all at w, and the means of both losses; of a number, or of an array of examples' losses.

    A loss that is not finite gives a ρ that is not.
    """
    rhos, means, here = [], [], None
    if points == 1:
        weights.settle()
        here = loss()
    for j in directions:
        if points == 1:
            weights.shift(j, eps)
            above, below = loss(), here
        else:
            above, below = weights.both(j, eps, loss)
        with np.errstate(invalid="ignore", over="ignore"):  # ∞ − ∞
            rhos.append((above - below) / (points * eps))
            means.append((above + below) / 2)
    return rhos, means


def _each(loss: Callable[[Any], float], batch: Any) -> NDArray[np.float64]:
    """The losses of batches of one example, one after another: in one batch they would share its padded width."""
    return np.array([loss(example) for example in batch])
