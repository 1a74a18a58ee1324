"""Many clients on one machine: they share the base model and take turns, or train side by side."""

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from .adapter import Adapter
from .algorithms import ALGORITHMS
from .config import Recipe, load_recipe
from .data.instructions import endless_batches
from .data.shares import Shares, share_out
from .evaluate import Evaluation, evaluate
from .messages import Run
from .models.load import load_model, load_tokenizer
from .models.loss import batch_loss
from .randomness import Purpose, cohort, generator
from .round import Report, answer, run_round
from .store import Store
from .strategies.kseed import State
from .strategy import Client
from .weights import hold
from .workers import Answer, Workers, computing_with


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


class Simulation:
    """A federation in one process, made from a recipe.

    Attributes:
        strategy: the algorithm; `strategy.init()` is the state before the first round.
        weights: the model that the clients share.
        shares: the data.
    """

    def __init__(self, recipe: Recipe, progress: Progress | None = None, shares: Shares | None = None) -> None:
        self.recipe, self.progress = recipe, progress or Silent()
        self.progress.note(f"loading {recipe.model.name}")
        self.tokenizer = load_tokenizer(recipe.model.name)
        self.shares = shares or share_out(recipe, self.tokenizer)
        self.model = load_model(recipe.model.name, recipe.model.dtype, recipe.model.storage, recipe.model.device)
        self.weights = hold(self.model, recipe.pool, recipe.model.tuned, recipe.model.mode)
        run = Run(recipe.pool, self.weights.base_digest)
        self.strategy = ALGORITHMS[recipe.training.algorithm](recipe.training, run)
        self.stopwatch = Stopwatch()
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
        count = len(self.shares.clients)
        return cohort(self.recipe.seed, round_, count, self.recipe.clients.cohort_of(count))

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
            number, self.weights, len(examples), batches, lambda batch: batch_loss(self.model, batch), on_step
        )

    def transport(self, data: bytes, clients: Sequence[int]) -> Iterable[tuple[int, bytes]]:
        """Carry a message to clients of this machine: one after the other, or `at_once` at a time."""
        options, steps = self.recipe.clients, self.recipe.training.steps
        threads = options.threads or max(1, torch.get_num_threads() // options.at_once)
        if options.at_once > 1:
            if self._workers is None:
                self.progress.note(f"starting {options.at_once} processes")
                count = min(options.at_once, options.cohort)
                self._workers = Workers(count, threads, _prepare, self.recipe, self.shares)
            self.progress.begin(f"{len(clients)} clients, {options.at_once} at once", len(clients) * steps)
            for number, upload, seconds in self._workers.answers(data, clients):
                self.stopwatch.steps += seconds
                self.progress.advance(steps)
                yield number, upload
            return
        for k, number in enumerate(clients):
            self.progress.begin(f"client {number} ({k + 1} of {len(clients)})", steps)
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

    def round(self, state: State) -> tuple[State, Report]:
        """The next round."""
        return run_round(self.strategy, state, self.cohort(state.round), self.transport)

    def evaluate(self, state: State, what: str) -> Evaluation:
        """Score the model of a state on the held-out examples."""
        self.load(state)
        options = self.recipe.evaluation
        self.progress.begin(what, options.examples + options.generated)
        return evaluate(
            self.model,
            self.tokenizer,
            self.shares.held_out,
            generated=options.generated,
            max_new_tokens=options.max_new_tokens,
            rouge=options.rouge,
            batch_size=options.batch_size,
            on_progress=self.progress.advance,
        )

    def load(self, state: State) -> float:
        """Give the model the weights of a state; returns the seconds it took."""
        start = time.perf_counter()
        self.weights.load(self.strategy.broadcast(state).coefficients)
        return time.perf_counter() - start

    def adapter(self, state: State) -> Adapter:
        """The model of a state as a file."""
        self.load(state)
        recipe, weights = self.recipe, self.weights
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
            pool=recipe.pool,
            coefficients=weights.c.copy(),
            base=weights.base_digest.hex(),
            tuned=weights.digest().hex(),
            patterns=tuple(recipe.model.tuned),
            provenance=provenance,
        )


def _prepare(recipe: Recipe, shares: Shares) -> Answer:
    """What answers in a process of its own."""
    return Simulation(recipe, shares=shares).answer


@dataclass(frozen=True, slots=True)
class Result:
    """What a whole run was like."""

    before: Evaluation
    after: Evaluation
    reports: list[dict[str, Any]]
    peak_memory: int  # bytes, of this process
    step_seconds: float | None  # median; None if a resumed run had nothing left to do
    sync_seconds: float  # streamed weights are made while the model runs: nearly nothing
    weights: int  # d
    digest: str  # of the tuned model, hexadecimal
    directory: Path


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
    state = store.state()
    if state is None:
        store.commit(state := simulation.strategy.init(), None)
    store.copy_metrics()
    before = _evaluated(store, "before", simulation, simulation.strategy.init())
    while state.round < simulation.recipe.training.rounds:
        state, report = simulation.round(state)
        store.commit(state, report)
        simulation.progress.round_done(report)
    after = _evaluated(store, "after", simulation, state)
    adapter = simulation.adapter(state)
    adapter.save(store.adapter)
    return Result(
        before=before,
        after=after,
        reports=store.reports(),
        peak_memory=peak_memory(),
        step_seconds=median(simulation.stopwatch.steps) if simulation.stopwatch.steps else None,
        sync_seconds=simulation.load(state),
        weights=simulation.weights.layout.size,
        digest=adapter.tuned,
        directory=store.directory,
    )


def _evaluated(store: Store, name: str, simulation: Simulation, state: State) -> Evaluation:
    """An evaluation, done once in a run's life."""
    known = store.recall(name)
    if known is None:
        known = asdict(simulation.evaluate(state, f"held-out examples, {name}"))
        store.remember(name, known)
    return Evaluation(**known)


def peak_memory() -> int:
    """The most memory that this process had resident so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
