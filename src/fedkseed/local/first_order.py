"""First-order steps: backpropagation, with SGD or Adam."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import FedKSeedError
from ..weights.full import FullWeights, all_finite
from .client import Client
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
                if _hand_over(pairs):
                    stepper.step()
                    losses.append(value)
                for parameter, exact in pairs:
                    if exact is not parameter:
                        parameter.data.copy_(exact)
                    parameter.grad = exact.grad = None
            on_step(value)
    return Trained(mean_loss(losses), steps - len(losses))


def _hand_over(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> bool:
    """Give each exact copy its parameter's gradient, and return whether all gradients are finite."""
    finite = True
    for parameter, exact in pairs:
        if parameter.grad is not None:
            exact.grad = parameter.grad.to(exact.dtype)
            finite = finite and all_finite(exact.grad)
    return finite


def train(client: Client[FullWeights], round_: int, *, optimizer: str, lr: float, steps: int) -> Trained:
    """Take a client's first-order steps of one round.

    Raises:
        FedKSeedError: the client can't backpropagate, or its weights diverge.
    """
    if client.graph is None:
        raise FedKSeedError(
            f"client {client.number} brings no loss to backpropagate through; give it Client(graph=...)"
        )
    weights, batches = client.weights, client.batches(round_)
    trained = first_order_steps(
        weights, client.graph, batches, steps=steps, lr=lr, optimizer=optimizer, on_step=client.on_step
    )  # fmt: skip
    if not weights.finite:
        raise FedKSeedError(
            f"the weights of client {client.number} have diverged in round {round_ + 1}; use a smaller lr than {lr:g}"
        )
    return trained
