"""Zeroth-order steps: tuning with the memory of inference.

Malladi et al., 2023, https://arxiv.org/abs/2305.17333; Qin et al., 2024, Eq. 5 and 6;
Fang et al., 2022, https://arxiv.org/abs/2201.09531 (one point)
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..wire.numbers import scalar

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from ..weights.base import Weights

Batch = TypeVar("Batch")


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
    """
    scalars = np.full(directions.size, np.nan, np.float32)
    losses: list[float] = []
    for step, batch in enumerate(islice(batches, directions.size // probes)):
        first, here = len(losses), math.nan
        mine = range(step * probes, (step + 1) * probes)
        if points == 1:
            weights.settle()
            here = loss(batch)
        for k in mine:
            j = int(directions[k])
            if points == 1:
                weights.shift(j, eps)
                above, below = loss(batch), here
            else:
                above, below = weights.both(j, eps, partial(loss, batch))
            found = scalar((above - below) / (points * eps), clip, wire)
            if math.isfinite(above) and math.isfinite(below) and math.isfinite(found):
                scalars[k] = found
                losses.append((above + below) / 2)
        for k in mine:
            if not np.isnan(scalars[k]):
                weights.move(int(directions[k]), -lr / probes * float(scalars[k]))
        on_step(sum(losses[first:]) / len(losses[first:]) if len(losses) > first else math.nan)
    weights.settle()
    return Steps(scalars, sum(losses) / len(losses) if losses else math.nan)
