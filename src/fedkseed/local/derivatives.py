"""First-order steps in R^K: one pass backward gives the derivatives along all K directions at once."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import DivergedError
from .kept_steps import KeptSteps
from .optimizers import Optimizer
from .zeroth_order import mean_loss

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from torch import Tensor

    from ..weights.base import Pooled

Batch = TypeVar("Batch", bound=Any)


@dataclass(frozen=True, slots=True)
class Moved:
    """Result of one client's local steps."""

    change: NDArray[np.float32]  # (K,), c after the steps less c before
    loss: float  # mean over the steps; NaN if none was finite
    skipped: int  # steps whose loss or derivatives were not finite: they moved nothing


def derivative_steps(
    weights: "Pooled",
    loss: "Callable[[Batch], Tensor]",
    batches: Iterable[Batch],
    *,
    steps: int,
    lr: float,
    optimizer: Optimizer,
    on_step: Callable[[float], None] = lambda loss: None,
    noised: Callable[[int, NDArray[np.float64]], NDArray[np.float64]] | None = None,
    kept: KeptSteps | None = None,
) -> Moved:
    """Take the steps c ← c − η Zᵀ∇L on one batch after another, or an optimiser's steps.

    Zᵀ∇L is the derivative of L(w(c)) by c. A two-point estimate along one direction estimates one of its K numbers.
    The optimiser starts anew in every round: a client keeps nothing from round to round.

    Args:
        noised: takes the number of a step and the derivatives of each example, shape (B, K), and returns what is used
            in place of their mean, see `Private`; a batch is then a sequence of batches of one example, no step is
            skipped, and no loss is reported. None: no noise.
        kept: where the coefficients so far are kept, and those of the same steps are taken up.

    Raises:
        DivergedError: the coefficients diverge.
    """
    losses: list[float] = []
    before = weights.c.copy()
    c, moments = before.astype(np.float64), optimizer.init(before.size)
    done = 0
    if kept is not None and (so_far := kept.read()):
        done, losses = int(so_far["done"][0]), so_far["losses"].tolist()
        c, moments = so_far["c"], (so_far["first"], so_far["second"])
        weights.load(c)
    for k, batch in islice(enumerate(batches), done, steps):
        if noised is None:
            value, slope = weights.gradient(partial(loss, batch))
            sound = math.isfinite(value) and bool(np.isfinite(slope).all())
        else:
            rows = np.stack([weights.gradient(partial(loss, example))[1] for example in batch])
            value, slope, sound = math.nan, noised(k, rows), True
        if sound:
            losses.append(value)
            step, moments = optimizer.step(moments, slope, len(losses))
            c = c - lr * step
            if not (np.abs(c) <= np.finfo(np.float32).max).all():
                raise DivergedError(f"the coefficients have diverged; use a smaller lr than {lr:g}")
            weights.load(c)
        if kept is not None:
            first, second = moments
            kept.keep(done=np.array([k + 1]), losses=np.array(losses), c=c, first=first, second=second)
        on_step(value)
    return Moved(weights.c - before, mean_loss(losses), steps - len(losses))
