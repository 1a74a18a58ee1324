"""Federated tuning of a user's own model, loss and data, from Python and without a recipe."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..directions import Pool
from ..directions.factors import Basis
from ..errors import FedKSeedError
from ..local.client import Client
from ..local.work import LocalWork
from ..randomness import Purpose, generator, pool_key
from ..round import Report, answer, decode_once, run_round
from ..run.best_round import ROUNDS, require_movement
from ..run.cohort import cohort
from ..strategies.kseed import KSeed, State
from ..strategy import Settings
from ..weights.adapter import Adapter
from ..weights.base import Pooled
from ..weights.modes import hold
from ..wire.records import Run

Loss: TypeAlias = Callable[[Any, Any], Tensor]  # of a model and a batch, a scalar; the lower the better


@dataclass(frozen=True, slots=True)
class Tuned:
    """The end of `tune`; the model itself holds the tuned weights."""

    state: State
    reports: list[Report]  # one a round
    adapter: Adapter  # the tuned model, in a file of 4 bytes a direction: adapter.save, fedkseed.apply


class Parties:
    """Clients of one process that share a model and take turns, each with batches of its own.

    Args:
        model: any module. It is held until `finish`, in evaluation mode: the two losses of a step must not differ by
            dropout.
        loss: (model, batch) to a scalar tensor; for forward-only steps it needs no gradient.
        batches: of each client; a batch is whatever `loss` takes. A pass takes each once, in an order of its own, and
            goes on from round to round.
        local: the local steps; `sgd` and `adam` take derivatives along all directions, `two points` runs forward only.
        pool: the K directions; by default 4,096 of the family hadamard.
        tuned: shell patterns of parameter names.
        mode: where weights live, see `fedkseed.hold`.
        seed: of cohorts, batches and directions.
        basis: the factors of the pool's directions, for the families that need them.
        wire: the precision of numbers that travel, see wire/numbers.py.

    Raises:
        FedKSeedError: there is no client, one has no batch, or the model can't be held.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, batches: Sequence[Sequence[Any]], local: LocalWork, *,
        pool: Pool | None = None, tuned: Sequence[str] = ("*",), mode: str = "auto", seed: int = 0,
        basis: Basis | None = None, wire: str = "compact",
    ) -> None:  # fmt: skip
        if not batches or 0 in map(len, batches):
            raise FedKSeedError(f"every client needs a batch, got {[*map(len, batches)]} batches of clients")
        if local.epochs is not None and not local.backpropagates:
            raise FedKSeedError(f"epochs = {local.epochs} is of steps that take derivatives; give steps to two points")
        self.model, self.loss, self.batches, self.seed, self.patterns = model, loss, batches, seed, tuple(tuned)
        self.basis = basis
        self._training = [(module, module.training) for module in model.modules()]
        self._trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            model.requires_grad_(False).eval()
            self.weights: Pooled = hold(model, pool or Pool(pool_key(seed), 4096), tuned, mode, basis)
            run = Run(self.weights.pool, self.weights.base_digest)
            forward = replace(local, steps_of="two points", epochs=None) if local.backpropagates else local
            self.strategy = KSeed.make(Settings(run, forward, local if local.backpropagates else None, wire=wire))
        except BaseException:
            self._give_back()
            raise

    def client(self, number: int) -> Client[Pooled]:
        """One client, as algorithms see it."""
        rows, derivatives = self.batches[number], self.strategy.settings.derivatives is not None
        steps = self.strategy.settings.work(derivatives).count(len(rows))  # of a round

        def batches(round_: int) -> Iterator[Any]:
            for passed in count(round_ * steps // len(rows)):
                order = generator(self.seed, Purpose.BATCHES, passed, number).permutation(len(rows))
                yield from (rows[i] for i in order[max(0, round_ * steps - passed * len(rows)) :])

        graph = (lambda batch: self.loss(self.model, batch)) if derivatives else None
        return Client(number, self.weights, len(rows), batches, self.value, graph=graph)

    @torch.inference_mode()
    def value(self, batch: Any) -> float:
        """The loss of a batch as a number."""
        return float(self.loss(self.model, batch))

    def cohort(self, round_: int, size: int | None = None) -> list[int]:
        """The clients of a round: a random draw of `size`, or all."""
        count = len(self.batches)
        if size is not None and not 1 <= size <= count:
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

    def finish(self, state: State) -> Adapter:
        """Write the weights of a state into the model, let go of it, and return them as an adapter."""
        self.load(state)
        weights, unknown = self.weights, dict.fromkeys(("dtype", "template", "separator"), "")
        origin = {"model": type(self.model).__name__, **unknown, "rounds": state.round}
        base, digest = weights.base_digest.hex(), weights.digest().hex()
        adapter = Adapter(weights.pool, weights.c.copy(), base, digest, self.patterns, origin, self.basis)
        weights.keep()
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


def tune(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Sequence[Any]],
    local: LocalWork,
    *,
    size: int | None = None,
    on_round: Callable[[Report], object] = lambda report: None,
    **options: Any,
) -> Tuned:
    """Tune a model in place on data of several clients, with messages of kilobytes between them and a server.

    Args:
        batches: of each client; they are used by that client's local steps alone.
        local: the local steps, and T, the number of rounds.
        size: clients that take part in a round; default all.
        on_round: called with the report of each round.
        options: further arguments of `Parties`: pool, tuned, mode, seed, basis, wire.

    Raises:
        FedKSeedError: an argument is out of range, no loss is finite, or the numbers diverge; the model is w_0 again.

    Example:
        tuned = fedkseed.tune(model, loss, batches, fedkseed.LocalWork(rounds=20, steps=20, lr=1e-2))
    """
    parties, reports = Parties(model, loss, batches, local, **options), []
    state = parties.strategy.server.init()
    try:
        for number in range(local.rounds):
            state, report = run_round(parties.strategy, state, parties.cohort(number, size), parties.transport)
            reports.append(report)
            on_round(report)
            require_movement([(report.loss, report.skipped) for report in reports[: ROUNDS + 1]], local.rounds)
        return Tuned(state, reports, parties.finish(state))
    except BaseException:
        parties.release()
        raise
