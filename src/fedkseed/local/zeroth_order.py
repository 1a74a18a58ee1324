"""Two-point zeroth-order steps: tuning with the memory of inference.

Malladi et al., 2023, https://arxiv.org/abs/2305.17333; Qin et al., 2024, Eq. 5 and 6
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from ..weights import Weights

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Steps:
    """What the local steps of one client found."""

    directions: NDArray[np.uint32]  # (τ,) or fewer: steps whose loss was not finite are left out
    scalars: NDArray[np.float32]  # same shape, ρ
    loss: float  # mean over the steps


def two_point_steps(
    weights: "Weights",
    loss: Callable[[Batch], float],
    batches: Iterable[Batch],
    directions: NDArray[np.uint32],
    *,
    lr: float,
    eps: float,
    clip: float,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Steps:
    """Step along one direction z_j after the other, each with a batch of its own.

    ρ = [L(w(c + ε e_j)) − L(w(c − ε e_j))] / 2ε, rounded to float32 and clipped to ±clip, then
    c_j ← c_j − η ρ. The model is left somewhere near; call `weights.settle()` to get w(c). A step
    whose loss is NaN or infinite moves nothing and is not reported.
    """
    taken, scalars, losses = [], [], []
    for j, batch in zip(directions.tolist(), batches, strict=False):
        weights.shift(j, eps)
        above = loss(batch)
        weights.shift(j, -eps)
        below = loss(batch)
        mean = (above + below) / 2
        on_step(mean)
        if not math.isfinite(mean):
            continue
        scalar = float(np.float32(min(max((above - below) / (2 * eps), -clip), clip)))
        weights.move(j, -lr * scalar)
        taken.append(j)
        scalars.append(scalar)
        losses.append(mean)
    mean_loss = sum(losses) / len(losses) if losses else math.nan
    return Steps(np.array(taken, np.uint32), np.array(scalars, np.float32), mean_loss)
