"""Many clients on one machine: they share the base model and take turns, or train side by side."""

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .adapter import Adapter
from .algorithms import ALGORITHMS, OUTPUT
from .asynchronous import Step, asynchronous, durations, synchronous
from .config import Recipe, load_recipe
from .data.instructions import endless_batches
from .data.shares import Shares, share_out
from .delta import lack, restore
from .errors import FedKSeedError
from .evaluate import Evaluation, evaluate
from .files import folder
from .free import Free
from .messages import Run
from .models.load import load_model, load_tokenizer
from .models.loss import checkpointable, checkpointed, graph_loss, output_loss, output_weights
from .models.tuned import PATTERNS, Adapters, attach
from .objectives import objective_of
from .randomness import Purpose, generator, share_of
from .round import Report, answer, run_round
from .store import Store
from .strategies.kseed import KSeed
from .strategy import Client
from .weights import Layout, Pooled, Weights, hold
from .wire import encode
from .workers import Answer, Workers, computing_with

NEWCOMER = (1 << 32) - 1  # a client that has seen nothing: what it is sent gives the whole model


class Progress(Protocol):
    """Who wants to see a run go on."""

    def note(self, text: str) -> None: ...
    def begin(self, what: str, total: int) -> None: ...
    def advance(self, count: int = 1, loss: float | None = None) -> None: ...
    def round_done(self, report: Report) -> None: ...


class Silent:
    """Shows nothing."""

    def note(self, text: str) -> None: ...
    def begin(self, what: str, total: int) -> None: ...
    def advance(self, count: int = 1, loss: float | None = None) -> None: ...
    def round_done(self, report: Report) -> None: ...


@dataclass(slots=True)
class Stopwatch:
    """Seconds of single local steps; a client's first step also waits for its sync."""

    steps: list[float] = field(default_factory=list)
    last: float | None = None

    def tick(self) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.steps.append(now - self.last)
        self.last = now


def _not_kept(done: int) -> Any:
    raise FedKSeedError(
        f"a client of this round began with the state after {done} rounds; give round() a function that finds it"
    )


class Simulation:
    """A federation in one process, made from a recipe.

    Args:
        serves: does this process aggregate? A server of weights holds a copy of them.

    Attributes:
        strategy: the algorithm; `strategy.init()` is the state before the first round.
        weights: the model that the clients share.
        shares: the data.
    """

    def __init__(
        self, recipe: Recipe, progress: Progress | None = None, shares: Shares | None = None, serves: bool = True
    ) -> None:
        self.recipe, self.progress = recipe, progress or Silent()
        algorithm = ALGORITHMS[recipe.training.algorithm]
        if recipe.model.storage != "dense" and not algorithm.pooled:
            raise FedKSeedError(
                f"{recipe.training.algorithm} can't tune a model whose weights are kept {recipe.model.storage}: "
                "set [model] storage = 'dense'"
            )
        if algorithm.replays and recipe.clients.at_once > 1:
            raise FedKSeedError(
                f"clients of {recipe.training.algorithm} remember the rounds that they have seen, and one model stands "
                "in for all of them here: set [clients] at_once = 1"
            )
        algorithm.require_read(recipe)
        differentiated = algorithm.differentiates or recipe.clients.backpropagating > 0
        if differentiated and recipe.training.objective != "loss":
            raise FedKSeedError(
                f"{recipe.training.algorithm} takes derivatives, and {recipe.training.objective!r} has no gradient: "
                "set [training] objective = 'loss', or an algorithm with zeroth-order steps alone, as 'fedkseed'"
            )
        self.objective = objective_of(recipe.training.objective, recipe.evaluation.max_new_tokens)
        self.progress.note(f"loading {recipe.model.name}")
        self.tokenizer = load_tokenizer(recipe.model.name)
        self.shares = shares or share_out(recipe, self.tokenizer)
        if recipe.asynchronous is not None:
            recipe.asynchronous.require(len(self.shares.clients))
        self.model = load_model(recipe.model.name, recipe.model.dtype, recipe.model.storage, recipe.model.device)
        patterns = recipe.model.tuned
        if patterns is None:
            patterns = output_weights(self.model) if algorithm.tuned == "output" else ["*"]
        if algorithm.adapts:
            patterns = PATTERNS[algorithm.tuned]
            self.model = attach(self.model, algorithm.tuned, Adapters(**recipe.peft.model_dump()), recipe.seed)
        pool = algorithm.pool(recipe)
        if algorithm.pooled:
            self.weights: Weights = hold(self.model, pool, patterns, recipe.model.mode)
        else:
            self.weights = Free(Layout(self.model, patterns), pool)
        self.run = Run(pool, self.weights.base_digest)
        start = self.weights.values() if serves and isinstance(self.weights, Free) else np.empty(0, np.float32)
        tensors = tuple((entry.number, entry.tensor.numel()) for entry in self.weights.layout.tuned)
        self.strategy = algorithm.make(recipe, self.run, start, tensors)
        self.patterns = tuple(patterns)
        if recipe.derivatives.checkpointing:
            checkpointable(self.model)  # refuse before anything is evaluated
        self.backpropagating = share_of(recipe.seed, len(self.shares.clients), recipe.clients.backpropagating)
        self.stopwatch = Stopwatch()
        self._plan, self._planned = self._make_plan(), list[Step]()
        self._kept: dict[int, bytes] = {}  # of this round: clients that still hold the last broadcast
        self._workers: Workers | None = None  # started by the first round that wants them

    @property
    def identity(self) -> dict[str, str]:
        """What must not change between a run's processes."""
        return {
            "directions": str(self.weights.pool),
            "a base model of digest": self.weights.base_digest.hex(),
            "data of digest": self.shares.digest(),
        }

    def cohort(self, round_: int) -> list[int]:
        """Who takes part in a round."""
        return list(self.planned(round_).begun)

    def planned(self, round_: int) -> Step:
        """Who takes part in a round, what they began with, and when it ends in virtual time."""
        while len(self._planned) <= round_:
            self._planned.append(next(self._plan))
        return self._planned[round_]

    def _make_plan(self) -> Iterator[Step]:
        clients, late, count = self.recipe.clients, self.recipe.asynchronous, len(self.shares.clients)
        steps = [self.steps(number) for number in range(count)]
        times = durations(self.recipe.seed, steps, clients.slow_share, clients.slow_factor)
        if late is None:
            return synchronous(self.recipe.seed, times, clients.cohort_of(count))
        concurrency, limit = late.concurrency or clients.cohort_of(count), late.max_staleness
        return asynchronous(self.recipe.seed, times, late.buffer, concurrency, math.inf if limit is None else limit)

    def client(self, number: int, stopwatch: Stopwatch | None = None) -> Client:
        """One party with its own examples."""
        examples, recipe = self.shares.clients[number], self.recipe

        def batches(round_: int) -> Iterator[Any]:
            rng = generator(recipe.seed, Purpose.BATCHES, round_, number)
            return endless_batches(examples, recipe.training.batch_size, self.tokenizer.pad_token_id, rng)

        def on_step(loss: float) -> None:
            if stopwatch is not None:
                stopwatch.tick()
            self.progress.advance(1, loss)

        return Client(
            number,
            self.weights,
            len(examples),
            batches,
            loss=lambda batch: self.objective(self.model, self.tokenizer, batch),
            on_step=on_step,
            graph=self._graph(number),
        )

    def _graph(self, number: int) -> Callable[[Any], Tensor] | None:
        """What a client differentiates, if it does."""
        algorithm = ALGORITHMS[self.recipe.training.algorithm]
        if algorithm.backpropagates or number in self.backpropagating:
            return self._graph_of_all_layers
        if algorithm.local == OUTPUT:
            return lambda batch: output_loss(self.model, batch)
        return None

    def _graph_of_all_layers(self, batch: Any) -> Tensor:
        again = self.recipe.derivatives.checkpointing
        with checkpointed(self.model) if again else nullcontext():
            return graph_loss(self.model, batch)

    def steps(self, number: int) -> int:
        """Local steps of a client in a round."""
        strategy: Any = self.strategy
        examples = len(self.shares.clients[number])
        if not isinstance(strategy, KSeed):
            return strategy.local.count(examples)
        if strategy.derivatives is not None and self._graph(number) is not None:
            return strategy.derivatives.count(examples)
        return strategy.steps

    def transport(self, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
        """Carry messages to clients of this machine: one after the other, or `at_once` at a time."""
        options = self.recipe.clients
        restored = {number: restore(data, self._kept.get(number)) for number, data in messages.items()}
        yield from ((number, lack(messages[number], number)) for number, data in restored.items() if data is None)
        messages = {number: data for number, data in restored.items() if data is not None}
        threads = options.threads or max(1, torch.get_num_threads() // options.at_once)
        steps = {number: self.steps(number) for number in messages}
        if options.at_once > 1:
            if self._workers is None:
                self.progress.note(f"starting {options.at_once} processes")
                self._workers = Workers(options.at_once, threads, _prepare, self.recipe, self.shares)
            self.progress.begin(f"{len(messages)} clients, {options.at_once} at once", sum(steps.values()))
            for number, upload, seconds in self._workers.answers(messages):
                self.stopwatch.steps += seconds
                self.progress.advance(steps[number])
                yield number, upload
            return
        for k, (number, data) in enumerate(messages.items()):
            self.progress.begin(f"client {number} ({k + 1} of {len(messages)})", steps[number])
            with computing_with(threads):
                upload, seconds = self.answer(data, number)
            self.stopwatch.steps += seconds
            yield number, upload

    def answer(self, data: bytes, number: int) -> tuple[bytes, list[float]]:
        """One client's upload, and the seconds of its steps but the first, which waits for the sync."""
        watch = Stopwatch()
        return answer(self.strategy, data, self.client(number, watch)), watch.steps

    def close(self) -> None:
        """End the processes that were started."""
        if self._workers is not None:
            self._workers.close()

    @property
    def reach(self) -> int:
        """How many rounds ago a state may be that a round needs."""
        rounds = range(self.recipe.training.rounds)
        return max(done - min([*self.planned(done).begun.values(), *self._held(done).values()]) for done in rounds)

    def _held(self, round_: int) -> dict[int, int]:
        """Clients of a round that hold a broadcast, and of which round: those who took part just before they began."""
        if not ALGORITHMS[self.recipe.training.algorithm].pooled:
            return {}
        last = {i: self.planned(begun - 1).begun.get(i) for i, begun in self.planned(round_).begun.items() if begun}
        return {client: held for client, held in last.items() if held is not None}

    def round(self, state: Any, earlier: Callable[[int], Any] | None = None) -> tuple[Any, Report]:
        """The next round.

        Args:
            earlier: finds the state after so many rounds: the one with which a client of an asynchronous round began,
                and the one whose broadcast clients still hold. Left out: nobody holds one.
        """
        if isinstance(self.weights, Free) and ALGORITHMS[self.recipe.training.algorithm].replays:
            self.load(state)  # one model stands in for clients that have seen more or less of it
        step = self.planned(state.round)
        find = earlier or _not_kept
        states = {client: find(begun) for client, begun in step.begun.items() if begun < state.round}
        held = {client: find(of) for client, of in self._held(state.round).items()} if earlier else {}
        self._kept = {client: encode(self.strategy.broadcast(of, [client])[client]) for client, of in held.items()}
        after, report = run_round(self.strategy, state, list(step.begun), self.transport, states, self._kept)
        elsewhere = self.recipe.clients.at_once > 1 or self.weights.layout.entries[0].tensor.device.type != "cpu"
        computed = None if elsewhere else report.cpu_seconds
        return after, replace(report, given_up=step.given_up, clock=step.clock, cpu_seconds=computed)

    def holdings(self) -> dict[str, Any]:
        """Who holds what: the examples of each client, and how many of each category."""
        counts = [Counter(e.example.category for e in share) for share in self.shares.clients]
        return {
            "examples": [len(share) for share in self.shares.clients],
            "categories": [dict(sorted(count.items())) for count in counts],
            "too_long": self.shares.too_long,
            "held_out": len(self.shares.held_out),
        }

    def evaluate(self, state: Any, what: str, write: bool = True) -> Evaluation:
        """Score the model of a state on the held-out examples; `write` the answers that the recipe asks for."""
        self.load(state)
        options = self.recipe.evaluation
        generated = options.generated if write else 0
        self.progress.begin(what, len(self.shares.held_out) + generated)
        return evaluate(
            self.model,
            self.tokenizer,
            self.shares.held_out,
            generated=generated,
            max_new_tokens=options.max_new_tokens,
            rouge=options.rouge,
            batch_size=options.batch_size,
            on_progress=self.progress.advance,
        )

    def load(self, state: Any) -> float:
        """Give the model the weights of a state; returns the seconds it took."""
        start = time.perf_counter()
        self.strategy.sync(self.strategy.broadcast(state, [NEWCOMER])[NEWCOMER], self.weights)
        return time.perf_counter() - start

    def save(self, state: Any, store: Store) -> Path | None:
        """Write the model of a state into a run's directory: coefficients, adapters or all weights."""
        if ALGORITHMS[self.recipe.training.algorithm].pooled:
            self.adapter(state).save(store.adapter)
            return store.adapter
        self.load(state)
        if not self.recipe.save:
            return None
        with folder(store.model) as part:
            self.model.save_pretrained(part)  # pyright: ignore[reportCallIssue] — a module to pyright
            self.tokenizer.save_pretrained(part)
        return store.model

    def adapter(self, state: Any) -> Adapter:
        """The model of a state as a file.

        Raises:
            FedKSeedError: the algorithm's model is not a function of K coefficients.
        """
        self.load(state)
        recipe, weights = self.recipe, self.weights
        if not isinstance(weights, Pooled):
            raise FedKSeedError(
                f"the model of {recipe.training.algorithm} is not a function of K coefficients; use save()"
            )
        provenance = {
            "model": recipe.model.name,
            "dtype": recipe.model.dtype,
            "storage": recipe.model.storage,
            "template": recipe.data.template,
            "separator": recipe.data.separator,
            "algorithm": recipe.training.algorithm,
            "rounds": state.round,
            "seed": recipe.seed,
        }
        return Adapter(
            pool=weights.pool,
            coefficients=weights.c.copy(),
            base=weights.base_digest.hex(),
            tuned=weights.digest().hex(),
            patterns=self.patterns,
            provenance=provenance,
        )


def _prepare(recipe: Recipe, shares: Shares) -> Answer:
    """What answers in a process of its own."""
    return Simulation(recipe, shares=shares, serves=False).answer


@dataclass(frozen=True, slots=True)
class Result:
    """What a whole run was like."""

    before: Evaluation
    after: Evaluation
    reports: list[dict[str, Any]]
    peak_memory: int  # bytes, of this process
    step_seconds: float | None  # median; None if a resumed run had nothing left to do
    sync_seconds: float | None  # nearly nothing, if streamed; None where a client replays what it has missed
    weights: int  # d, those that are tuned
    digest: str  # of the tuned model, hexadecimal
    output: Path | None  # the tuned model: coefficients, adapters or all weights


def start(recipe: Recipe, directory: Path, progress: Progress | None = None) -> Result:
    """Run a recipe in a new directory, which is made once model and data are loaded.

    Raises:
        FedKSeedError: the recipe can't be run, or the directory holds a run already.
    """
    Store.require_new(directory)  # refuse before a minute of loading
    recipe = recipe.absolute()
    simulation = Simulation(recipe, progress)
    with closing(simulation), Store.create(directory, recipe.to_toml()) as store:
        return work(store, simulation)


def resume(directory: Path, progress: Progress | None = None) -> Result:
    """Go on with a run that was stopped, from its last committed round.

    Raises:
        FedKSeedError: there is no run, another process works on it, or model or data have changed.
    """
    store = Store(directory)
    with store.locked(), closing(Simulation(load_recipe(store.recipe), progress)) as simulation:
        return work(store, simulation)


def work(store: Store, simulation: Simulation) -> Result:
    """Do what is left of a run; the caller keeps other processes off it."""
    store.require_same(simulation.identity)
    state = store.state(simulation.strategy.state)
    if state is None:
        store.commit(state := simulation.strategy.init(), None)
    store.remember("clients", simulation.holdings())
    store.copy_metrics()
    rounds, every, reach = simulation.recipe.training.rounds, simulation.recipe.evaluation.every, simulation.reach
    store.remember("reach", reach)
    before = _evaluated(store, simulation, simulation.strategy.init())
    while state.round < rounds:
        if every and state.round % every == 0:
            _evaluated(store, simulation, state)
        state, report = simulation.round(state, lambda done: store.state(simulation.strategy.state, done))
        store.commit(state, report, keep=2 + reach)
        simulation.progress.round_done(report)
    after = _evaluated(store, simulation, state)
    output = simulation.save(state, store)
    store.remember("peak_memory", peak_memory())
    return Result(
        before=before,
        after=after,
        reports=store.reports(),
        peak_memory=peak_memory(),
        step_seconds=median(simulation.stopwatch.steps) if simulation.stopwatch.steps else None,
        sync_seconds=None if ALGORITHMS[simulation.recipe.training.algorithm].replays else simulation.load(state),
        weights=simulation.weights.layout.size,
        digest=simulation.weights.digest().hex(),
        output=output,
    )


def _evaluated(store: Store, simulation: Simulation, state: Any) -> Evaluation:
    """The evaluation after some rounds, done once in a run's life; the first and the last model write answers."""
    ends = (0, simulation.recipe.training.rounds)
    known = store.evaluations().get(state.round)
    if known is None:
        known = asdict(simulation.evaluate(state, f"held-out examples, round {state.round}", state.round in ends))
        store.evaluated(state.round, known)
    return Evaluation(**known)


def peak_memory() -> int:
    """The most memory that this process had resident so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
