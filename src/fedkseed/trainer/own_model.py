"""Clients of one process with a user's own model, loss and batches, without a recipe."""

import glob
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..directions import Pool
from ..directions.factors import Basis
from ..errors import FedKSeedError
from ..local.client import Client
from ..local.work import LocalWork
from ..randomness import Purpose, generator, pool_key
from ..round import answer, decode_once
from ..run.cohort import cohort
from ..strategies.kseed import KSeed, State
from ..strategy import Settings
from ..weights.adapter import Adapter
from ..weights.base import Pooled
from ..weights.modes import hold
from ..wire.records import Run
from .client_batches import batches_of_clients

Loss: TypeAlias = Callable[[Any, Any], Tensor]  # of a model and a batch, a scalar; the lower the better


class Parties:
    """Clients of one process that share a model and take turns, each with batches of its own.

    Args:
        model: any module. It is held until `finish`, in evaluation mode: the two losses of a step must not differ by
            dropout.
        loss: (model, batch) to a scalar tensor; for forward-only steps it needs no gradient.
        batches: of each client, a list or a DataLoader; a batch is whatever `loss` takes. A pass takes each once, in an
            order of its own, and goes on from round to round. A list of batches, or a single DataLoader, is one client.
        local: the local steps; `sgd` and `adam` take derivatives along all directions, `two points` runs forward only.
            The learning rate is one of steps on the weights themselves, see `adjust`.
        pool: the K directions; by default 4,096 of the family hadamard.
        tuned: shell patterns of parameter names; default: those that require a gradient, or all where none does.
        mode: where weights live, see `fedkseed.hold`.
        seed: of cohorts, batches and directions.
        basis: the factors of the pool's directions, for the families that need them.
        wire: the precision of numbers that travel, see wire/numbers.py.
        server: the server's optimiser: with `adam` it keeps moments from round to round, and `lr` is its rate.

    Raises:
        FedKSeedError: there is no client, one has no batch, or the model can't be held.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, batches: Any, local: LocalWork, *,
        pool: Pool | None = None, tuned: str | Sequence[str] | None = None, mode: str = "auto", seed: int = 0,
        basis: Basis | None = None, wire: str = "compact", server: str = "sgd",
    ) -> None:  # fmt: skip
        model = getattr(model, "_orig_mod", model)  # of torch.compile, whose code would be made anew for each point
        if not isinstance(model, nn.Module) or not callable(loss):
            kinds = f"a {type(model).__name__} and a {type(loss).__name__}"
            raise FedKSeedError(f"give a torch.nn.Module and a loss, a function of (model, batch), got {kinds}")
        if local.epochs is not None and not local.backpropagates:
            raise FedKSeedError(f"epochs = {local.epochs} is of steps that take derivatives; give steps to two points")
        self.model, self.loss, self.seed, self.basis = model, loss, seed, basis
        patterns = [tuned] if isinstance(tuned, str) else trainable(model) if tuned is None else tuned
        self.batches, self.patterns = batches_of_clients(batches), tuple(patterns)
        if fresh := [name for name, seen in model.named_buffers() if name.endswith("num_batches_tracked") and not seen]:
            warnings.warn(
                f"{fresh[0].rpartition('.')[0]} has seen no batch, and steps use its running means as they are: first "
                "run some batches through the model, as in model.train(); [model(x) for x, _ in batches]; model.eval()",
                stacklevel=3,
            )
        self._training = [(module, module.training) for module in model.modules()]
        self._trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            model.requires_grad_(False).eval()
            self.weights: Pooled = hold(model, pool or Pool(pool_key(seed), 4096), self.patterns, mode, basis)
            run = Run(self.weights.pool, self.weights.base_digest)
            forward = replace(local, steps_of="two points", epochs=None) if local.backpropagates else local
            derivatives = local if local.backpropagates else None
            self.strategy = KSeed.make(Settings(run, forward, derivatives, wire=wire, server=server))
            self.adjust(local.lr, local.eps)
        except BaseException:
            self._give_back()
            raise

    def adjust(self, lr: float, eps: float, **changes: Any) -> None:
        """Take the steps that follow at other settings.

        Args:
            lr: as of a step on the weights themselves. It lowers the loss as much, to first order, as a step along all
                K directions: of SGD with lr / K, of Adam with lr √d / 2K, whose gradient of d weights has about half
                the 1-norm that its 2-norm allows; a two-point step along one direction does in the mean.
            changes: of other settings of local steps.
        """
        settings, size = self.strategy.settings, self.weights.pool.size
        derivatives, rate = settings.derivatives, lr
        if derivatives is not None:
            adam = "adam" in (settings.server, derivatives.steps_of)
            rate = lr / size * (math.sqrt(self.weights.layout.size) / 2 if adam else 1.0)
            derivatives = replace(derivatives, lr=rate, **changes)
        local = replace(settings.local, lr=rate, eps=eps, **changes)
        server_lr = rate if settings.server == "adam" else 1.0
        self.strategy = KSeed.make(replace(settings, local=local, derivatives=derivatives, server_lr=server_lr))

    def client(self, number: int) -> Client[Pooled]:
        """One client, as algorithms see it."""
        rows, derivatives = self.batches[number], self.strategy.settings.derivatives is not None
        steps = self.strategy.settings.work(derivatives).count(len(rows))  # of a round

        def batches(round_: int) -> Iterator[Any]:
            for passed in count(round_ * steps // len(rows)):
                order = generator(self.seed, Purpose.BATCHES, passed, number).permutation(len(rows))
                yield from (rows[i] for i in order[max(0, round_ * steps - passed * len(rows)) :])

        graph = self.graph if derivatives else None
        return Client(number, self.weights, len(rows), batches, self.value, graph=graph)

    @torch.inference_mode()
    def value(self, batch: Any) -> float:
        """The loss of a batch as a number."""
        return float(self.graph(batch))

    def graph(self, batch: Any) -> Any:
        """The loss of a batch as a user's function returns it, if that is a single number."""
        loss, differentiates = self.loss(self.model, batch), self.strategy.settings.derivatives is not None
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return loss.reshape(())
        if isinstance(loss, float | np.floating):
            if not differentiates:
                return loss
            advice = "leave .item() and float() out, or take steps_of='two points', which needs no gradient"
        else:
            advice = "return its .loss" if hasattr(loss, "loss") else "return one number, such as loss.mean()"
        got = (
            f"a tensor of {tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        )
        raise FedKSeedError(f"loss(model, batch) returned {got}, and must return a tensor of one number: {advice}")

    def cohort(self, round_: int, size: int | None = None) -> list[int]:
        """The clients of a round: a random draw of `size`, or all."""
        count = len(self.batches)
        if size is not None and not (isinstance(size, Integral) and 1 <= size <= count):
            raise FedKSeedError(f"a cohort of {size} can't be drawn from {count} clients")
        return cohort(self.seed, round_, count, size or count)

    def transport(self, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
        """Carry messages to clients of this process, one after the other."""
        read = decode_once()
        for number, data in messages.items():
            yield number, answer(self.strategy, data, self.client(number), read)

    def load(self, state: State) -> None:
        """Give the model the weights of a state."""
        self.strategy.load(state, self.weights)

    def adapter(self, state: State) -> Adapter:
        """Give the model the weights of a state, and return them as an adapter."""
        self.load(state)
        weights, unknown = self.weights, dict.fromkeys(("dtype", "template", "separator"), "")
        origin = {"model": type(self.model).__name__, **unknown, "rounds": state.round}
        base, digest = weights.base_digest.hex(), weights.digest().hex()
        return Adapter(weights.pool, weights.c.copy(), base, digest, self.patterns, origin, self.basis)

    def finish(self, state: State) -> Adapter:
        """Write the weights of a state into the model, let go of it, and return them as an adapter."""
        adapter = self.adapter(state)
        self.weights.keep()
        self._give_back()
        return adapter

    def release(self) -> None:
        """Let go of the model, which is w_0 again."""
        self.weights.restore()
        self._give_back()

    def _give_back(self) -> None:
        """Restore which modules were in training mode, and which parameters could be trained."""
        for module, training in self._training:
            module.training = training
        for parameter, trainable in self._trainable:
            parameter.requires_grad_(trainable)


def trainable(model: nn.Module) -> list[str]:
    """Patterns of the parameters that require a gradient: all, where none does.

    Raises:
        FedKSeedError: a parameter has no values yet.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        raise FedKSeedError(f"the model {type(model).__name__} has no parameters; give one that has")
    for name, parameter in parameters.items():
        if is_lazy(parameter) or parameter.is_meta:
            raise FedKSeedError(
                f"the parameter {name} has no values yet; run the model on a batch, or load its weights"
            )
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    return ["*"] if len(frozen) in (0, len(parameters)) else [glob.escape(n) for n in parameters if n not in frozen]
