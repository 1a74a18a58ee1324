"""The loss on a few of the clients' batches: by it a rate is chosen, and a training that diverges is ended."""

import math
import warnings
from functools import partial
from statistics import fmean

import numpy as np

from ..errors import DivergedError, FedKSeedError
from ..randomness import Purpose, generator
from ..round import Report, run_round
from ..run.best_round import ROUNDS
from ..run.eps_ladder import LADDER, SAMPLES, judge, ladder
from ..strategies.kseed import State
from .own_model import Parties

SEARCH = "search"  # lr, eps
UNTIL_FOUND = 1e-3  # eps; a broadcast has one even where no step needs it
BATCHES = 8  # at most, of as many clients as there are
RISE = 0.2  # over the base model's loss, as a part of it: more is divergence
LEAST = 0.01  # of the base model's loss: a training that gains less has learned hardly anything
FEW = 20  # steps, of which nothing is expected
START = {"adam": 1e-3, "sgd": 1e-2, "two points": 1e-3}  # the first rate that is tried
FACTOR = 4.0  # between rates
CLIMBS, TRIAL_STEPS, TRIAL_CLIENTS = 6, {"adam": 40, "sgd": 40, "two points": 80}, BATCHES
PLATEAU = 0.1  # of the base model's loss: trials that gain less stand on one, a rise of held-out losses is no noise
ENOUGH = 0.8  # of the best trial's gain: what is best for a few steps is often too much for many


class Judge:
    """The mean loss of a training's models on the same batches.

    Args:
        parties: at the base model.
        lr: the learning rate that messages name.

    Raises:
        FedKSeedError: the base model's loss on a batch is not finite.
    """

    def __init__(self, parties: Parties, lr: float = 1.0) -> None:
        self.parties, self.lr, self.looked, self.reported = parties, lr, 0, list[float]()
        self.lowest: tuple[float, State | None] = math.inf, None  # a round's training loss, and the state after it
        clients = range(min(BATCHES, len(parties.batches)))
        self.places = [(c, k) for k in range(BATCHES) for c in clients if k < len(parties.batches[c])][:BATCHES]
        self.looked_at = f"{len(self.places)} of the clients' batches"
        parties.progress.note(parties.summary())
        losses = self._losses()
        for place, loss in zip(self.places, losses, strict=True):
            if not math.isfinite(loss):
                raise FedKSeedError(
                    f"the base model's loss is {loss} on {parties.batch(*place)}; look at the loss, at that batch, and "
                    "at the model's weights and their type"
                )
        self.base = fmean(losses)
        self.limit = self.base + RISE * fmean(map(abs, losses))

    def _losses(self) -> list[float]:
        return [self.parties.value(self.parties.batch(*place)) for place in self.places]

    def loss(self, state: State) -> float:
        """The loss of a state's model, which the weights then hold."""
        self.parties.load(state)
        return fmean(self._losses())

    def round(self, state: State, size: int | None) -> tuple[State, Report]:
        """Do a round with a cohort of a size; refused if the training has diverged."""
        parties = self.parties
        try:
            state, report = run_round(parties.strategy, state, parties.cohort(state.round, size), parties.transport)
        except DivergedError as error:
            raise self.diverged(state.round + 1, math.inf) from error
        self.note(state, report)
        return state, report

    def note(self, state: State, report: Report) -> None:
        """Look at a state where the losses of the last rounds are a suspicion; refused if it has diverged."""
        self.reported.append(report.loss)
        if report.loss < self.lowest[0]:
            self.lowest = report.loss, state
        if len(self.reported) - self.looked >= ROUNDS and not any(x <= self.limit for x in self.reported[-ROUNDS:]):
            self.looked = len(self.reported)
            self.require_convergence(state)

    def require_convergence(self, state: State) -> float:
        """The loss of a state; refused if it is far above the base model's, or not finite."""
        loss = self.loss(state)
        if not loss <= self.limit:
            raise self.diverged(state.round, loss)
        return loss

    def diverged(self, rounds: int, loss: float) -> DivergedError:
        """The error of a training that has diverged in a round, with its best model."""
        _, state = self.lowest
        lowest, kept = (math.inf if state is None else self.loss(state)), "no round's model was better"
        error = DivergedError()
        if state is not None and lowest < self.base:
            error.best = self.parties.adapter(state)
            kept = (
                f"the best one, after {state.round} rounds with a loss of {lowest:.4g}, is this error's `best`: "
                "best.apply(model) or best.save(FILE)"
            )
        error.args = (
            f"the training diverges: after {rounds} rounds the loss on {self.looked_at} is "
            f"{loss:.4g}, where the base model's is {self.base:.4g}. Take a smaller lr than {self.lr:g}, such as "
            f"{self.lr / 10:.2g}, or lr='search'. The model is the base model again; {kept}",
        )
        return error

    def search_eps(self) -> float:
        """Set the eps of least error for the base model, on clients' batches; refused if no eps measures a slope."""
        parties, advance = self.parties, partial(self.parties.progress.advance, 1)
        parties.progress.begin("search of eps", SAMPLES * len(LADDER))
        parties.load(parties.strategy.server.init())
        drawn = generator(parties.seed, Purpose.TUNE, 0).integers(parties.weights.pool.size, size=SAMPLES).tolist()
        losses = [ladder(parties.client(k % len(parties.batches)), j, advance) for k, j in enumerate(drawn)]
        parties.load(parties.strategy.server.init())
        if (eps := judge(np.array(losses)).eps) is None:
            raise FedKSeedError(
                "no eps of the ladder measures a slope of this model's loss: at least half of each scalar is rounding "
                "or curvature. Hold the model in float32, take larger batches, or give eps, a number such as 1e-3"
            )
        parties.progress.note(f"eps = {eps:g}")
        parties.adjust(self.lr, eps)
        return eps

    def search_rate(self, kind: str, steps: int, cohort: int | None) -> None:
        """Set the smallest learning rate that gains nearly as much as the best in short trials from the base model.

        Where all gain little, it is the largest that gains.

        Rates are a factor of 4 apart. They go upwards until one is far worse, and downwards while the lowest is best.

        Args:
            kind: of steps: `adam`, `sgd` or `two points`.
            steps: of a client in a round.
            cohort: clients of a round; None: all.
        """
        parties, start, eps = self.parties, START[kind], self.parties.strategy.settings.local.eps
        size = min(cohort or len(parties.batches), TRIAL_CLIENTS)

        def gain(lr: float) -> float:
            parties.adjust(lr, eps, steps=min(steps, TRIAL_STEPS[kind]))
            state = parties.strategy.server.init()
            try:
                for number in range(math.ceil(TRIAL_STEPS[kind] / steps)):
                    state, _ = run_round(parties.strategy, state, parties.cohort(number, size), parties.transport)
                loss = self.loss(state)
            except DivergedError:
                loss = math.inf
            parties.progress.note(f"tried lr {lr:.2g}: loss {self.base:.4g} -> {loss:.4g}")
            return self.base - loss if math.isfinite(loss) else -math.inf

        gains, worse = {0: gain(start)}, self.limit - self.base  # by power of FACTOR
        while max(gains) < CLIMBS and gains[max(gains)] >= max(gains.values()) - worse and gains[max(gains)] > -worse:
            gains[max(gains) + 1] = gain(start * FACTOR ** (max(gains) + 1))  # past a plateau, too
        while min(gains) > -CLIMBS and gains[min(gains)] == max(gains.values()):
            gains[min(gains) - 1] = gain(start * FACTOR ** (min(gains) - 1))
        most = max(gains.values())
        if most < PLATEAU * abs(self.base):  # a small rate would stay there
            enough = [max((power for power, gained in gains.items() if gained > 0), default=0)]
        else:
            enough = [power for power, gained in gains.items() if gained >= ENOUGH * most]
        self.lr = float(f"{start * FACTOR ** min(enough):.2g}")
        parties.progress.note(f"lr = {self.lr:g}, of the losses on {self.looked_at}")
        parties.adjust(self.lr, eps, steps=steps)

    def end(self, state: State, steps: int, skipped: int, held_out: bool) -> None:
        """Refuse the last state if it has diverged, and warn where steps were left out or little was learned."""
        loss = self.require_convergence(state)
        said = f"the loss on {self.looked_at} is {loss:.4g}, and was {self.base:.4g}"
        if len(self.parties.batches) > 1 and not held_out:
            said += "; losses of clients' own batches say little about other rows, so hold some out to score on"
        self.parties.progress.note(said)
        if skipped:
            warnings.warn(f"{skipped:,} steps of the training had no finite loss, or no change of it", stacklevel=3)
        if steps >= FEW and self.base - loss < LEAST * abs(self.base):
            warnings.warn(
                f"hardly anything was learned: the loss on {self.looked_at} is {loss:.6g}, the base model's "
                f"{self.base:.6g}. Take a larger lr than {self.lr:g}, more steps, or a model that was trained on other "
                "data",
                stacklevel=3,
            )


def searches(name: str, setting: object) -> bool:
    """Whether a setting is to be searched; a text that says anything else is refused."""
    if isinstance(setting, str) and setting != SEARCH:
        raise FedKSeedError(f"{name} is a number or {SEARCH!r}, got {setting!r}")
    return isinstance(setting, str)
