"""First-order steps: backpropagation, with SGD or Adam."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from ..weights.full import FullWeights, all_finite
from .zeroth_order import mean_loss

Batch = TypeVar("Batch")
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}  # Adam as Kingma and Ba, 2015, with their defaults


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of one client's local steps; the weights are in the model."""

    loss: float  # mean over the steps; NaN if none was finite
    skipped: int  # steps whose loss or gradient was not finite: they moved nothing


def first_order_steps(
    weights: FullWeights,
    loss: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    *,
    steps: int,
    lr: float,
    optimizer: str = "sgd",
    on_step: Callable[[float], None] = lambda loss: None,
) -> Trained:
    """Take the steps w ← w − η g on one batch after another (SGD; Eq. 2 of Qin et al., 2024), or Adam's steps.

    The optimiser starts anew in every round: a client keeps nothing from round to round.
    """
    losses: list[float] = []
    with weights.trainable() as pairs, torch.enable_grad():
        stepper = OPTIMIZERS[optimizer]([exact for _, exact in pairs], lr=lr)
        for batch in islice(batches, steps):
            graph = loss(batch)
            value = float(graph.detach())
            if math.isfinite(value):
                graph.backward()
                for parameter, exact in pairs:  # each exact copy gets its parameter's gradient
                    exact.grad = None if parameter.grad is None else parameter.grad.to(exact.dtype)
                if all(exact.grad is None or all_finite(exact.grad) for _, exact in pairs):
                    stepper.step()
                    losses.append(value)
                for parameter, exact in pairs:
                    if exact is not parameter:
                        parameter.data.copy_(exact)
                    parameter.grad = exact.grad = None
            on_step(value)
    return Trained(mean_loss(losses), steps - len(losses))
