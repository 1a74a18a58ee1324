"""Zeroth-order steps: tuning with the memory of inference.

Malladi et al., 2023, https://arxiv.org/abs/2305.17333; Qin et al., 2024, Eq. 5 and 6;
Fang et al., 2022, https://arxiv.org/abs/2201.09531 (one point)
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from ..weights import Weights

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Steps:
    """What the local steps of one client found."""

    directions: NDArray[np.uint32]  # (τ P,) or fewer: probes whose loss was not finite are left out
    scalars: NDArray[np.float32]  # same shape, ρ
    loss: float  # mean over the probes; NaN if none was finite


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
    on_step: Callable[[float], None] = lambda loss: None,
) -> Steps:
    """Take a step with every batch, along the mean of P = `probes` estimates, and end at the new weights.

    With two points ρ = [L(w + ε z_j) − L(w − ε z_j)] / 2ε; with one, ρ = [L(w + ε z_j) − L(w)] / ε, where
    L(w) is computed once a step. ρ is rounded to float32 and clipped to ±clip; once the P probes of a
    step are done, w ← w − η ρ z_j / P for each (c_j ← c_j − η ρ / P, where weights are w(c)). A probe
    whose loss is NaN or infinite moves nothing and is not reported.

    Args:
        directions: j of every probe, shape (τ P,), step after step.
        points: 2, as MeZO and FedKSeed, or 1, as FedZO (its Eq. 4, on a batch of b1 examples with P = b2).
    """
    taken: list[int] = []
    scalars: list[float] = []
    losses: list[float] = []
    for step, batch in zip(directions.reshape(-1, probes).tolist(), batches, strict=False):
        first, here = len(taken), math.nan
        if points == 1:
            weights.settle()
            here = loss(batch)
        for j in step:
            if points == 1:
                weights.shift(j, eps)
                above, below = loss(batch), here
            else:
                above, below = weights.both(j, eps, partial(loss, batch))
            scalar = float(np.float32(min(max((above - below) / (points * eps), -clip), clip)))
            if math.isfinite(above) and math.isfinite(below) and math.isfinite(scalar):
                taken.append(j)
                scalars.append(scalar)
                losses.append((above + below) / 2)
        for j, scalar in zip(taken[first:], scalars[first:], strict=True):
            weights.move(j, -lr / probes * scalar)
        on_step(sum(losses[first:]) / len(losses[first:]) if len(losses) > first else math.nan)
    weights.settle()
    mean = sum(losses) / len(losses) if losses else math.nan
    return Steps(np.array(taken, np.uint32), np.array(scalars, np.float32), mean)
