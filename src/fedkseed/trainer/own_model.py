"""Clients of one process with a user's own model, loss and batches, without a recipe."""

import glob
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
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
from ..run.progress import Progress, Silent
from ..strategies.kseed import KSeed, State
from ..strategy import Settings
from ..weights.adapter import Adapter
from ..weights.base import Pooled
from ..weights.modes import hold
from ..weights.streamed import Unwritten
from ..wire.records import Run
from .client_batches import OwnedBatch, batches_of_clients, described
from .processes import Processes

PROBED = 1 << 24  # weights: the copy that a comparison needs is 64 MiB then
BESIDE = 1e-2  # how far from w_0 along a direction
ALIKE = 1e-3  # relative; tiles of a product differ in rounding by 1e-6, in bfloat16 by 1e-2

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
        tuned: shell patterns of parameter names; default: those that require a gradient.
        mode: where weights live, see `fedkseed.hold`; `auto`: in memory where the model uses them by ways of its own.
        seed: of cohorts, batches and directions.
        basis: the factors of the pool's directions, for the families that need them.
        wire: the precision of numbers that travel, see wire/numbers.py.
        server: the server's optimiser: with `adam` it keeps moments from round to round, and `lr` is its rate.

    Attributes:
        names: of the clients.
        progress: the watcher of steps; it shows nothing unless it is set.
        processes: of `torchrun`, which share the cohorts; None: this process trains all clients.

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
        self.progress: Progress = Silent()
        self.processes: Processes | None = None
        patterns = [tuned] if isinstance(tuned, str) else trainable(model) if tuned is None else tuned
        named, self.patterns = batches_of_clients(batches), tuple(patterns)
        self.names, self.batches = list(named), list(named.values())
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
            if isinstance(self.weights, Unwritten):
                self.weights.side_by_side.guard = torch.no_grad  # as `value`
            run = Run(self.weights.pool, self.weights.base_digest)
            forward = replace(local, steps_of="two points", epochs=None) if local.backpropagates else local
            derivatives = local if local.backpropagates else None
            self.strategy = KSeed.make(Settings(run, forward, derivatives, wire=wire, server=server))
            self.adjust(local.lr, local.eps)
            if mode != "materialized" and self.weights.layout.size <= PROBED:
                self.weights = self._seen_by_all(mode)
        except BaseException:
            self._give_back()
            raise

    def _seen_by_all(self, mode: str) -> Pooled:
        """The way to hold the weights, or another that all of the model sees.

        A module may write to its weights, hold them in a list or a closure, or differentiate them by code of its own,
        and then knows nothing of values that are made on the way. So loss and derivatives at one point are compared
        with those of weights in memory.

        Raises:
            FedKSeedError: they differ, and another way than `auto` was asked for.
        """
        numbers, pool = self._probe(self.weights), self.weights.pool
        dense = hold(self.model, pool, self.patterns, "materialized", self.basis)
        first, second = self._probe(dense), self._probe(dense)
        if numbers is None or first is None or second is None or not _alike(first, second):
            return self.weights  # an error, which steps will show, or a loss that is drawn
        if _alike(numbers, first):
            return self.weights
        if mode == "auto":
            return dense
        raise FedKSeedError(
            f"mode={mode!r}: {type(self.model).__name__} has a loss of {numbers[0]:.6g} or derivatives that are not "
            f"those of weights in memory, {first[0]:.6g}: a module may write to its weights, hold them elsewhere or "
            "differentiate them by code of its own; take mode='materialized'"
        )

    def _probe(self, weights: Pooled) -> NDArray[np.float64] | None:
        """The loss of a batch, and where clients take them its derivatives, at a point beside w_0; None: not finite.

        None, too, where the loss raises an error, which the first step then shows.
        """
        c, batch = np.zeros(weights.pool.size, np.float32), self.batch(0, 0)
        c[0] = BESIDE
        try:
            weights.load(c)
            if self.strategy.settings.derivatives is None:
                numbers = np.array([self.value(batch)])
            else:
                loss, slope = weights.gradient(lambda: self.graph(batch))
                numbers = np.array([loss, *slope])
        except FedKSeedError:
            return None
        finally:
            weights.restore()
        return numbers if np.isfinite(numbers).all() else None

    def adjust(self, lr: float, eps: float, **changes: Any) -> None:
        """Take the steps that follow at other settings.

        Args:
            lr: as of a step on the weights themselves. It lowers the loss as much, to first order, as a step along all
                K directions: of SGD with lr / K, of Adam with lr √d / 2K (a gradient's 1-norm is taken as half of √d
                times its 2-norm). A two-point step along one direction needs no factor: it does so on average.
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
        rows, steps = len(self.batches[number]), self.steps(number)

        def batches(round_: int) -> Iterator[OwnedBatch]:
            for passed in count(round_ * steps // rows):
                order = generator(self.seed, Purpose.BATCHES, passed, number).permutation(rows).tolist()
                yield from (self.batch(number, i) for i in order[max(0, round_ * steps - passed * rows) :])

        graph = None if self.strategy.settings.derivatives is None else self.graph
        return Client(number, self.weights, rows, batches, self.value, partial(self.progress.advance, 1), graph)

    def steps(self, number: int) -> int:
        """Local steps of a client in a round."""
        return self.strategy.settings.work(True).count(len(self.batches[number]))

    def batch(self, client: int, number: int) -> OwnedBatch:
        """A batch of a client."""
        return OwnedBatch.of(self.names[client], self.batches[client], number)

    @torch.no_grad()  # and not in inference mode: a module may keep what it makes, and be trained later
    def value(self, batch: OwnedBatch) -> float:
        """The loss of a batch as a number."""
        return float(self.graph(batch))

    def graph(self, batch: OwnedBatch) -> Any:
        """The loss of a batch as a user's function returns it, if that is a single number."""
        loss = batch.put_through("model or loss", self.loss, self.model)
        differentiates = self.strategy.settings.derivatives is not None
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return loss.reshape(())
        if isinstance(loss, float | np.floating):
            if not differentiates:
                return loss
            advice = "leave .item() and float() out, or take steps_of='two points', which needs no gradient"
        else:
            advice = "return its .loss" if hasattr(loss, "loss") else "return one number, such as loss.mean()"
        got = described(loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise FedKSeedError(
            f"loss(model, batch) returned {got}, and must return a tensor of one number: {advice}. It was called with "
            f"{batch}"
        )

    def summary(self) -> str:
        """The clients, batches and weights that were understood."""
        clients, own, layout = len(self.names), sum(map(len, self.batches)), self.weights.layout
        lists = "1 client (one list, or one DataLoader)" if clients == 1 else f"{clients} clients"
        counted = f"{own} batch{'es' * (own > 1)} in all, the first {described(self.batch(0, 0).batch)}"
        weights = f"{layout.size:,} of {sum(shape.numel() for shape in layout.shapes.values()):,} weights"
        return f"{lists} with {counted}; {weights} are tuned"

    def cohort(self, round_: int, size: int | None = None) -> list[int]:
        """The clients of a round: a random draw of `size`, or all."""
        count = len(self.batches)
        if size is not None and not (isinstance(size, Integral) and 1 <= size <= count):
            raise FedKSeedError(f"a cohort of {size} can't be drawn from {count} clients")
        return cohort(self.seed, round_, count, size or count)

    def transport(self, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
        """Carry messages to clients, one after the other; where there are several processes, to all of theirs."""
        uploads = self._uploads(messages)
        return uploads if self.processes is None else self.processes.exchange(uploads)

    def _uploads(self, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """The uploads of the clients that train in this process."""
        numbers = list(messages)
        mine = numbers if self.processes is None else self.processes.share(numbers)
        read = decode_once()
        for k, number in enumerate(mine, 1):
            self.progress.begin(f"{self.names[number]} ({k} of {len(mine)})", self.steps(number))
            yield number, answer(self.strategy, messages[number], self.client(number), read)

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


def _alike(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Compare two losses, and their derivatives as a whole; True where they differ by no more than rounding can."""
    return all(
        np.linalg.norm(a - b) <= ALIKE * max(np.linalg.norm(a), np.linalg.norm(b))
        for a, b in zip((one[:1], one[1:]), (other[:1], other[1:]), strict=True)
    )


def trainable(model: nn.Module) -> list[str]:
    """Patterns of the parameters that require a gradient.

    Raises:
        FedKSeedError: none does, or a parameter has no values yet.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        raise FedKSeedError(f"the model {type(model).__name__} has no parameters; give one that has")
    for name, parameter in parameters.items():
        if is_lazy(parameter) or parameter.is_meta:
            raise FedKSeedError(
                f"the parameter {name} has no values yet; run the model on a batch, or load its weights"
            )
    free = [glob.escape(name) for name, parameter in parameters.items() if parameter.requires_grad]
    if not free:
        raise FedKSeedError(
            f"all weights of the model {type(model).__name__} are frozen (requires_grad=False): set requires_grad of "
            "those that are to be tuned, or name them, as in tuned='*' for all, tuned='head.*'"
        )
    return ["*"] if len(free) == len(parameters) else free
