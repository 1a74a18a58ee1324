"""Many clients in one process: they share the base model and take turns on the working copy."""

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from .adapter import Adapter
from .algorithms import ALGORITHMS
from .config import Recipe, load_recipe
from .data.instructions import Encoded, encode_all, endless_batches
from .data.jsonl import Example, read
from .data.partition import dirichlet, even
from .errors import FedKSeedError
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


@dataclass(frozen=True, slots=True)
class Shares:
    """How the data fell: one list of examples a client, and what is held out."""

    clients: list[list[Encoded]]
    held_out: list[Encoded]
    too_long: int


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


def share_out(recipe: Recipe, tokenizer: Any) -> Shares:
    """Read, hold out, encode and divide the data; the same for the same recipe."""
    examples = read(recipe.data.source)
    held_out, training = _split(examples, recipe)
    options = tokenizer, recipe.data.template
    kept, too_long = encode_all(training, *options, recipe.data.max_tokens)
    kept_out, _ = encode_all(held_out, *options, recipe.evaluation.max_tokens or recipe.data.max_tokens)
    if len(kept_out) < recipe.evaluation.examples:
        raise FedKSeedError(
            f"[evaluation] asks for {recipe.evaluation.examples} held-out examples, "
            f"{len(kept_out)} are there within the token limit; ask for fewer or raise max_tokens"
        )
    clients, rng = recipe.clients, generator(recipe.seed, Purpose.PARTITION)
    if clients.alpha == "even":
        parts = even(len(kept), clients.count, clients.min_examples, rng)
    else:
        labels = [e.example.category for e in kept]
        parts = dirichlet(labels, clients.count, float(clients.alpha), clients.min_examples, rng)
    order = generator(recipe.seed, Purpose.EVALUATION).permutation(len(kept_out))[: recipe.evaluation.examples]
    return Shares([[kept[i] for i in part] for part in parts], [kept_out[i] for i in order], too_long)


def _split(examples: Sequence[Example], recipe: Recipe) -> tuple[list[Example], list[Example]]:
    """Held-out and training examples: a whole category, or a random share."""
    chosen = recipe.data.held_out
    if isinstance(chosen, str):
        categories = sorted({e.category for e in examples})
        if chosen not in categories:
            raise FedKSeedError(
                f"[data] held_out is no category of the data: {chosen!r}; it has {', '.join(categories) or 'none'}"
            )
        return [e for e in examples if e.category == chosen], [e for e in examples if e.category != chosen]
    order = generator(recipe.seed, Purpose.HOLDOUT).permutation(len(examples))
    count = round(chosen * len(examples))
    return [examples[i] for i in sorted(order[:count])], [examples[i] for i in sorted(order[count:])]


class Simulation:
    """A federation in one process, made from a recipe.

    Attributes:
        strategy: the algorithm; `strategy.init()` is the state before the first round.
        weights: the model that the clients share.
        shares: the data.
    """

    def __init__(self, recipe: Recipe, progress: Progress | None = None) -> None:
        self.recipe, self.progress = recipe, progress or Silent()
        self.progress.note(f"loading {recipe.model.name}")
        self.tokenizer = load_tokenizer(recipe.model.name)
        self.shares = share_out(recipe, self.tokenizer)
        self.model = load_model(recipe.model.name, recipe.model.dtype)
        self.weights = hold(self.model, recipe.pool, recipe.model.tuned, recipe.model.mode)
        run = Run(recipe.pool, self.weights.base_digest)
        self.strategy = ALGORITHMS[recipe.training.algorithm](recipe.training, run)
        self.stopwatch = Stopwatch()

    def cohort(self, round_: int) -> list[int]:
        """Who takes part in a round."""
        return cohort(self.recipe.seed, round_, self.recipe.clients.count, self.recipe.clients.cohort)

    def client(self, number: int) -> Client:
        """One party with its own examples."""
        examples, recipe = self.shares.clients[number], self.recipe

        def batches(round_: int) -> Iterator[Any]:
            rng = generator(recipe.seed, Purpose.BATCHES, round_, number)
            return endless_batches(examples, recipe.training.batch_size, self.tokenizer.pad_token_id, rng)

        def on_step(loss: float) -> None:
            self.stopwatch.tick()
            self.progress.advance(1, loss)

        return Client(
            number, self.weights, len(examples), batches, lambda batch: batch_loss(self.model, batch), on_step
        )

    def transport(self, data: bytes, clients: Sequence[int]) -> Iterable[tuple[int, bytes]]:
        """Carry a message to clients of this process, one after the other."""
        for k, number in enumerate(clients):
            self.stopwatch.last = None
            self.progress.begin(f"client {number} ({k + 1} of {len(clients)})", self.recipe.training.steps)
            yield number, answer(self.strategy, data, self.client(number))

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
            "template": recipe.data.template,
            "algorithm": recipe.training.algorithm,
            "rounds": state.round,
            "seed": recipe.seed,
        }
        return Adapter(
            pool=recipe.pool,
            coefficients=weights.c.copy(),
            base=weights.base_digest.hex(),
            tuned=weights.layout.digest().hex(),
            patterns=tuple(recipe.model.tuned),
            provenance=provenance,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What a whole run was like."""

    before: Evaluation
    after: Evaluation
    reports: list[dict[str, Any]]
    peak_memory: int  # bytes, of this process
    step_seconds: float | None  # median; None if a resumed run had nothing left to do
    sync_seconds: float
    weights: int  # d
    digest: str  # of the tuned model, hexadecimal
    directory: Path


def start(recipe: Recipe, directory: Path, progress: Progress | None = None) -> Result:
    """Run a recipe in a new directory, which is made once model and data are loaded."""
    Store.require_new(directory)
    simulation = Simulation(recipe, progress)
    return _work(Store.create(directory, recipe.to_toml()), simulation)


def resume(directory: Path, progress: Progress | None = None) -> Result:
    """Go on with a run that was stopped, from its last committed round."""
    store = Store(directory)
    with store.locked():  # refuse before a minute of loading
        simulation = Simulation(load_recipe(store.recipe), progress)
    return _work(store, simulation)


def _work(store: Store, simulation: Simulation) -> Result:
    with store.locked():
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
