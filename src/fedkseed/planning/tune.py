"""A range test that finds a perturbation scale and a learning rate for a recipe; docs/algorithms.md has the reasons.

Held-out examples are not used: they could not judge a recipe that was chosen by them.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import FedKSeedError
from ..evaluation.metrics import Metrics
from ..evaluation.statistics import Estimate, Evaluation, paired_change, require_finite
from ..local.schedules import scheduled
from ..randomness import Purpose, generator
from ..recipe.algorithms import algorithm_of
from ..recipe.schema import Recipe
from ..round import run_round
from ..run.eps_ladder import Clock, Scalars, measure
from ..run.progress import Progress
from ..run.simulation import Simulation
from ..strategy import Strategy
from ..wire.records import MAX_BROADCAST

TRIAL_EXAMPLES = 64  # number of the clients' training examples on which trials are compared
TRIAL_STEPS = 32  # of all clients of a trial together
SHORT_EXAMPLES, SHORT_TRIALS = 32, 5  # of a search that takes seconds: its examples, and rates that it should try
EVALUATED_IN_A_STEP = 12  # examples that are evaluated in about the time of a step on a batch of 4
RATE_FACTOR = 4  # between learning rates; the best one times and over √RATE_FACTOR are tried last
MAX_TRIALS = 12  # at most
NORM_MARGIN = 1.5  # times the usual norm of a client's change
LOST = 0.1  # of the gain, by too few directions, that does not harm: it is within the error of a run
CLIP_MARGIN = 8.0  # root mean squares of ρ: the tails of a batch's ρ are longer than those of a normal distribution


@dataclass(frozen=True, slots=True)
class Trial:
    """One short round from the base model with one learning rate."""

    lr: float
    losses: list[float]  # of the examples after the round; empty if the round failed
    failure: str = ""

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses) if self.losses else math.inf

    def change(self, before: Sequence[float]) -> Estimate:
        """Change from other losses of the same examples; infinite where the trial failed."""
        return paired_change(before, self.losses) if math.isfinite(self.mean) else Estimate(math.inf, 0.0)


@dataclass(slots=True)
class Tuning:
    """The results of a range test."""

    recipe: Recipe
    cohort: list[int]  # clients of a trial
    steps: int  # local steps of each client in a trial
    client_limit: float | None = None  # largest η at which one client's steps can lower the loss on average
    cohort_limit: float | None = None  # the same for a whole cohort
    scalars: Scalars | None = None  # None for algorithms that backpropagate
    weighted_steps: float = 0.0  # see `weighted_steps`
    before: list[float] = field(default_factory=list)  # losses of the base model
    trials: list[Trial] = field(default_factory=list)
    spent: bool = False  # whether the time limit ended the trials

    @property
    def eps(self) -> float | None:
        return None if self.scalars is None else self.scalars.eps

    @property
    def clip(self) -> float | None:
        """A largest |ρ| that honest clients hardly ever reach; None where no scalars travel, or the recipe has one."""
        training = self.recipe.training
        if self.scalars is None or training.clip is not None or training.wire == "sign" or not self.scalars.square:
            return None
        return float(f"{CLIP_MARGIN * math.sqrt(self.scalars.square):.1g}")

    @property
    def norm(self) -> float | None:
        """A norm that the change of c by a client hardly passes, for `table`; None where no scalars travel.

        Along directions that hardly meet, τ steps of P probes add up to η √(τ / P · mean ρ²).
        """
        training = self.recipe.training
        if self.table is None or self.scalars is None or not self.scalars.square:
            return None
        square = 1.0 if training.wire == "sign" else self.scalars.square
        usual = (self.lr or self.recipe_lr) * math.sqrt(training.steps / training.probes * square)
        return float(f"{NORM_MARGIN * usual:.1e}")

    def lost(self, size: int) -> float | None:
        """The part of the gain that K directions lose to a pool without end; None where curvature is not known.

        Steps of a rate η along one direction lead to the least loss along it as 1 − exp(−η tr H n), n of them. Drawn
        from K directions that hardly meet, W steps gain (1 − exp(−x)) / x of what W directions do, x = 2 η tr H W / K.
        The paper's Theorem 2 bounds the error of a single step by the size of the directions' mean, of the order
        K^(−1/2), whatever there is to learn; this is about the gain of a run.
        """
        training, algorithm = self.recipe.training, algorithm_of(self.recipe.training.algorithm)
        pooled = algorithm.pooled and not algorithm.differentiates and self.recipe.directions.basis is None
        # signs, and a server's Adam, move coefficients by other steps than η ρ
        if not pooled or self.scalars is None or training.wire == "sign" or training.server != "sgd":
            return None
        if not self.scalars.curvature.mean > self.scalars.curvature.error:  # known to less than a factor of 2
            return None
        x = 2 * (self.lr or self.recipe_lr) * self.scalars.curvature.mean * self.weighted_steps / size
        return 1 + math.expm1(-x) / x if x else 0.0

    @property
    def enough(self) -> int | None:
        """The least power of 2 of directions that lose no more than LOST; None where it is not known."""
        sizes = (1 << power for power in range(6, MAX_BROADCAST.bit_length()))
        return next((size for size in sizes if (lost := self.lost(size)) is not None and lost <= LOST), None)

    @property
    def size(self) -> int | None:
        """More directions for a recipe whose own lose more than LOST; None where they do not."""
        enough = self.enough
        return enough if enough is not None and enough > self.recipe.directions.size else None

    @property
    def table(self) -> str | None:
        """The table of the recipe that has the norm of a client's change; None if none has."""
        privacy = "privacy" if self.recipe.privacy is not None and self.recipe.privacy.unit == "client" else None
        return privacy if self.recipe.secure is None else "secure"

    @property
    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: (trial.mean, trial.lr))

    @property
    def lr(self) -> float | None:
        """The best learning rate that lowered the loss by two standard errors; None if none did.

        A larger rate may have lowered the mean more without being that sure: by luck, or near divergence.
        """
        changes = [(trial.change(self.before), trial.lr) for trial in self.trials]
        sure = [(change.mean, lr) for change, lr in changes if change.sign < 0]
        return min(sure)[1] if sure else None

    def worse(self, trial: Trial) -> bool:
        """Whether a trial is worse than the best, or than no training, by more than two standard errors."""
        return any(trial.change(losses).sign > 0 for losses in (self.best.losses, self.before))

    @property
    def alike(self) -> list[float]:
        """Learning rates that lowered the loss and are not worse than the best."""
        lower = [trial for trial in self.trials if trial.change(self.before).mean < 0]
        return [trial.lr for trial in lower if not self.worse(trial)]

    @property
    def suggested(self) -> Recipe:
        """The recipe with the values found in place of its own eps and lr, and with a clip if it has none."""
        settings = {"eps": self.eps, "lr": self.lr, "clip": self.clip}
        update = {name: setting for name, setting in settings.items() if setting is not None}
        table = "derivatives" if derives(self.recipe) else "training"
        tables = {table: update}
        if self.size is not None:
            tables["directions"] = {"size": self.size}
        if self.table is not None and self.norm is not None:
            tables[self.table] = {"norm": self.norm}
        return self.recipe.having(**tables)

    @property
    def recipe_lr(self) -> float:
        training, derivatives = self.recipe.training, self.recipe.derivatives
        return derivatives.lr if derives(self.recipe) else training.lr or algorithm_of(training.algorithm).lr


def tune(
    recipe: Recipe,
    minutes: float = 5.0,
    steps: int | None = None,
    progress: Progress | None = None,
    clock: Clock = time.monotonic,
) -> Tuning:
    """Find eps and lr for a recipe by measurements on the base model.

    Args:
        minutes: time limit, loading included; no trial is begun that would pass it.
        steps: local steps of a client in a trial; by default the recipe's, but at most 32 for all clients together.

    Raises:
        FedKSeedError: the recipe can't be run, or the base model's losses are not finite.
    """
    begin = clock()
    # Worker processes would not see the trials' strategies.
    # Masks leave the mean change as it is, and of noise nothing is known that would be worth its trials.
    clear = recipe.having(clients={"at_once": 1}, secure=None, privacy=None)
    with closing(Simulation(clear, progress)) as simulation:
        return search(recipe, simulation, begin + 60 * minutes, steps, clock=clock)


def search(
    recipe: Recipe,
    simulation: Simulation,
    until: float,
    steps: int | None = None,
    step_seconds: float | None = None,
    clock: Clock = time.monotonic,
) -> Tuning:
    """Find eps and lr for a recipe until a point of time, by a simulation of it.

    Args:
        steps: see `tune`.
        step_seconds: of a local step, for a search that takes less than a minute, see `shorten`.
    """
    training, cohort = recipe.training, simulation.cohort(0)
    usual = (derives(recipe) and recipe.derivatives.steps) or training.steps
    tuning = Tuning(recipe, cohort, steps or min(usual, max(1, TRIAL_STEPS // len(cohort))), spent=clock() >= until)
    if tuning.spent:
        return tuning
    if not algorithm_of(training.algorithm).differentiates:
        scalars = tuning.scalars = measure(simulation, (clock() + until) / 2, clock)
        size = scalars.best.scalar if training.wire == "sign" else 1.0
        alone, together = limits(scalars.curvature, training.probes, simulation, cohort, size)
        tuning.client_limit, tuning.cohort_limit = alone, together
        tuning.weighted_steps = weighted_steps(simulation)
    try_rates(simulation, tuning, until, step_seconds, clock)
    return tuning


def weighted_steps(simulation: Simulation) -> float:
    """The mean local steps of a client that is in all rounds, each times its part of the learning rate."""
    training, clients = simulation.recipe.training, range(len(simulation.shares.clients))
    parts = sum(scheduled(1.0, training.schedule, round_, training.rounds) for round_ in range(training.rounds))
    return parts * sum(map(simulation.steps, clients)) / len(clients)


def limits(
    curvature: Estimate, probes: int, simulation: Simulation, cohort: Sequence[int], size: float = 1.0
) -> tuple[float | None, float | None]:
    """The largest η at which steps can lower the loss on average: those of one client, and those of a cohort.

    A step changes the loss by about −η |g|² + η²/2 E[ρ²] tr H / P, and E[ρ²] ≥ |g|². The average of n clients'
    steps has 1/n of the second term (1/n = Σ (n_i / Σ n)², n_i examples). None without positive curvature.

    Args:
        size: mean |ρ| where uploads hold signs alone: the change is then −η E|ρ| + η²/2 tr H / P, which is below 0 up
            to an η that is `size` times as large.
    """
    if curvature.sign < 1:
        return None, None
    alone = size * 2 * probes / curvature.mean
    held = np.array([len(simulation.shares.clients[number]) for number in cohort])
    return alone, alone / float(np.sum((held / held.sum()) ** 2))


def try_rates(
    simulation: Simulation,
    tuning: Tuning,
    until: float,
    step_seconds: float | None = None,
    clock: Clock = time.monotonic,
) -> None:
    """Add trials to the results until `rates` ends or the time is over; the model is w₀ afterwards."""
    recipe, examples, longest = simulation.recipe, TRIAL_EXAMPLES, 0.0
    if step_seconds is not None:
        examples, longest = shorten(tuning, step_seconds, until - clock())
    if tuning.spent:
        return
    bench = Bench(simulation, examples)
    tuning.before = bench.losses(simulation.strategy.server.init(), "training examples, base model")
    require_finite(Evaluation(tuning.before), recipe.model.name, recipe.model.dtype, "training rows")
    strategy = _with_settings(recipe, simulation.strategy, steps=tuning.steps, eps=tuning.eps or recipe.training.eps)
    if step_seconds is not None and derives(recipe):
        bench.take_step(_with_settings(recipe, strategy, lr=tuning.recipe_lr), tuning.recipe_lr, tuning.cohort)
    for lr in rates(tuning, tuning.recipe_lr):
        begin = clock()
        tuning.spent = begin + longest > until
        if tuning.spent:
            break
        tuning.trials.append(trial := bench.trial(_with_settings(recipe, strategy, lr=lr), lr))
        change = trial.change(tuning.before)
        simulation.progress.note(f"lr {lr:g}: " + (trial.failure or f"loss {change.text('+', 5)}"))
        longest = max(longest, clock() - begin)
    simulation.setup.load(simulation.strategy.server.init())


def shorten(tuning: Tuning, step_seconds: float, seconds: float) -> tuple[int, float]:
    """Make trials so short that SHORT_TRIALS of them fit into some time; the examples and the seconds of one.

    Where clients take derivatives along all directions, each takes one step, once, and trials scale it to their rates;
    fewer clients do where that is too slow. Others take fewer steps. The time is spent if not even two trials fit.
    """
    cohort, once, examples, each = tuning.cohort, derives(tuning.recipe), SHORT_EXAMPLES, 0.0
    sizes = [(tuning.steps >> halvings, len(cohort), SHORT_EXAMPLES) for halvings in range(tuning.steps.bit_length())]
    if once:
        sizes = [(1, len(cohort), SHORT_EXAMPLES), (1, len(cohort), 16), (1, 2, 16), (1, 1, 16), (1, 1, 8)]
    for tuning.steps, clients, examples in sizes:
        tuning.cohort = cohort[:clients]
        work = tuning.steps * len(tuning.cohort) * step_seconds
        evaluation = examples / EVALUATED_IN_A_STEP * step_seconds
        begin, each = (work + evaluation, evaluation) if once else (evaluation, work + evaluation)
        tuning.spent = begin + 2 * each > seconds
        if begin + SHORT_TRIALS * each <= seconds:
            break
    return examples, each


def rates(tuning: Tuning, own: float) -> Iterator[float]:
    """The learning rates to try, each chosen after the trial of the one before has been added to the results.

    All are the recipe's own rate times a power of RATE_FACTOR. They start one step below that rate, or two below the
    measured limit, climb until the loss is worse by two standard errors, and go down while the lowest is the best. Two
    rates halfway between the best and its neighbours come last.
    """
    lr = own / RATE_FACTOR
    if tuning.cohort_limit is not None:  # batches of few examples are noisy: their best rate is well below the limit
        lr = own * RATE_FACTOR ** (round(math.log(tuning.cohort_limit / own, RATE_FACTOR)) - 2)
    for _ in range(MAX_TRIALS):
        yield _two_digits(lr)
        if tuning.worse(tuning.trials[-1]):
            break
        lr *= RATE_FACTOR
    while len(tuning.trials) < MAX_TRIALS and tuning.best.lr == (lowest := min(trial.lr for trial in tuning.trials)):
        yield _two_digits(lowest / RATE_FACTOR)
    best = tuning.best.lr
    yield _two_digits(best / math.sqrt(RATE_FACTOR))
    yield _two_digits(best * math.sqrt(RATE_FACTOR))


class Bench:
    """A comparison of trials: on the same examples, from the same start, with the same batches and directions.

    Attributes:
        stepped: the state after a step with a learning rate of 1, from which those of all rates follow; None: a trial
            is a round.
    """

    def __init__(self, simulation: Simulation, examples: int = TRIAL_EXAMPLES) -> None:
        self.simulation = simulation
        self.stepped: Any = None
        everyone = [example for share in simulation.shares.clients for example in share]
        order = generator(simulation.recipe.seed, Purpose.TUNE, 1).permutation(len(everyone))[:examples]
        self.examples = [everyone[i] for i in order]
        self._base = simulation.setup.weights.checkpoint() if simulation.setup.algorithm.strategy.remembers else None

    def take_step(self, strategy: Strategy[Any], lr: float, clients: Sequence[int]) -> None:
        """Take one step with rate lr, and keep it as that of rate 1; only for models of K coefficients."""
        self.simulation.setup.strategy = strategy
        after, _ = run_round(strategy, strategy.server.init(), clients, self.simulation.transport)
        self.stepped = replace(after, coefficients=after.coefficients / lr)

    def trial(self, strategy: Strategy[Any], lr: float) -> Trial:
        """One round of a strategy, or the one step, from the base model."""
        self.simulation.setup.strategy = strategy
        try:
            if self.stepped is None:
                state, _ = self.simulation.round(strategy.server.init())
            else:
                state = replace(self.stepped, coefficients=self.stepped.coefficients * lr)
            losses = self.losses(state, f"training examples, lr {lr:g}")
        except FedKSeedError as error:  # a round raises it where numbers are out of range
            return Trial(lr, [], str(error))
        finally:  # the model that clients of replaying algorithms remember: each trial begins before the first round
            if self._base is not None:
                self.simulation.setup.weights.rewind(self._base)
        return Trial(lr, losses) if all(map(math.isfinite, losses)) else Trial(lr, [], "the loss is not finite")

    def losses(self, state: Any, what: str) -> list[float]:
        self.simulation.setup.load(state)
        return self.simulation.setup.score(self.examples, what, False, Metrics()).losses


def derives(recipe: Recipe) -> bool:
    """Whether the recipe's clients take derivatives in R^K; then their learning rate is that of [derivatives]."""
    algorithm = algorithm_of(recipe.training.algorithm)
    return algorithm.pooled and algorithm.differentiates


def _with_settings(recipe: Recipe, strategy: Strategy[Any], **changes: Any) -> Strategy[Any]:
    """The same strategy with other settings of local steps; in a mixed federation, those of its forward-only clients.

    A changed number of steps holds for all clients of the federation. A trial's round moves the model as far as a later
    one of a run, which begins with shorter steps by [trust] warmup.
    """
    settings = replace(strategy.settings, trust=replace(strategy.settings.trust, warmup=0))
    derivatives = settings.derivatives
    if derives(recipe) and derivatives is not None:
        settings = replace(settings, derivatives=replace(derivatives, epochs=None, **changes))
    else:
        settings = replace(settings, local=replace(settings.local, epochs=None, **changes))
        if "steps" in changes and derivatives is not None:
            settings = replace(settings, derivatives=replace(derivatives, epochs=None, steps=changes["steps"]))
    return algorithm_of(recipe.training.algorithm).strategy_of(settings)


def _two_digits(number: float) -> float:
    """A learning rate rounded to two digits: trials are not precise enough for more."""
    return float(f"{number:.1e}")
