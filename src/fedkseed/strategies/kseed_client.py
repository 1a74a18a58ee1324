"""The client of FedKSeed and its variants: local steps in R^K, and the upload that says where they have led.

Forward-only clients send a scalar a step; clients that take derivatives of the loss send the change of each
coefficient. Both are changes of c, so that one round can have clients of both kinds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.random import Generator

from ..local.client import Client
from ..local.derivatives import derivative_steps
from ..local.optimizers import Optimizer
from ..local.work import LocalWork
from ..local.zeroth_order import zeroth_order_steps
from ..strategy import Settings
from ..wire.numbers import rounded, scalars
from ..wire.records import Broadcast, Change, Upload
from .uploads import KSeedUpload, drawn_directions, largest_change, wire_of, wire_of_changes

if TYPE_CHECKING:  # a server that makes a strategy needs no PyTorch
    from torch import Tensor

    from ..weights.base import Pooled


@dataclass(frozen=True, slots=True)
class KSeedClient:
    """A client's part: c comes down, and the steps from it go up.

    Args:
        settings: `local` are the steps of clients that run the model forward only, `derivatives` those of clients that
            bring a loss with a graph (`Client.graph`). No client of either kind moves a coefficient by more than η τ
            clip of `local`.
    """

    message: ClassVar[type[Broadcast]] = Broadcast

    settings: Settings

    def sync(self, message: Broadcast, weights: "Pooled") -> None:
        weights.load(message.coefficients)

    def train(self, message: Broadcast, client: "Client[Pooled]") -> KSeedUpload:
        if self.settings.derivatives is not None and client.graph is not None:
            return self._take_derivatives(message, client, client.graph, self.settings.derivatives)
        pairs = message.steps * message.probes
        steps = zeroth_order_steps(
            client.weights,
            client.loss,
            client.batches(message.round),
            drawn_directions(self.settings, message.round, client.number, pairs, message.probabilities),
            probes=message.probes,
            lr=message.lr,
            eps=message.eps,
            clip=message.clip,
            wire=message.wire,
            on_step=client.on_step,
            noised=client.private and partial(client.private.mean, message.round),
            kept=client.kept,
        )
        about = self.settings.run, message.round, client.number, client.claimed
        return Upload(*about, steps.loss, steps.scalars, message.wire)

    def _take_derivatives(
        self, message: Broadcast, client: "Client[Pooled]", loss: "Callable[[Any], Tensor]", work: LocalWork
    ) -> Change:
        weights, batches = client.weights, client.batches(message.round)
        steps, lr = work.count(client.examples), work.learning_rate(message.round)
        optimizer, noised = Optimizer(work.steps_of), client.private and partial(client.private.mean, message.round)
        options = {"on_step": client.on_step, "noised": noised, "kept": client.kept}
        moved = derivative_steps(weights, loss, batches, steps=steps, lr=lr, optimizer=optimizer, **options)
        most = largest_change(self.settings, message.round)
        values = rounded(np.clip(moved.change, -most, most), wire_of(self.settings))
        weights.load(message.coefficients + values)  # the client holds exactly the change that it sends
        about = self.settings.run, message.round, client.number, client.claimed
        return Change(*about, moved.loss, moved.skipped, values, wire=wire_of_changes(self.settings))

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: Generator) -> KSeedUpload:
        settings = self.settings
        if differentiates and settings.derivatives is not None:
            values = rounded(rng.normal(size=settings.run.pool.size) * 1e-9, wire_of(settings))
            return Change(settings.run, round_, client, examples, 1.0, 0, values, wire=wire_of_changes(settings))
        sent = scalars(rng.normal(size=settings.local.scalars), wire_of(settings))
        return Upload(settings.run, round_, client, examples, 1.0, sent, wire_of(settings))
