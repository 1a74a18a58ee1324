"""The algorithms by name: README, command line, comparisons and contract tests read this table."""

import math
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..directions import FAMILIES, Pool
from ..errors import FedKSeedError
from ..local.work import LocalWork
from ..randomness import pool_key
from ..strategies.averaging import Averaging
from ..strategies.kseed import KSeed
from ..strategies.replay import Replay
from ..strategy import COEFFICIENTS, Settings, Strategy
from ..wire.records import Run
from . import own_code
from .schema import Derivatives, Recipe

UNLIMITED = 1 << 32  # seeds
SGD, ADAM, ONE, TWO = "sgd", "adam", "one point", "two points"
CHANGE = "K coefficients"
NOTHING = np.empty(0, np.float32)
OUTPUT, ALL = "derivatives of the output layer", "derivatives of all layers"  # in R^K


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row: a strategy, and what it is a strategy for.

    Args:
        strategy: its class.
        local: the kind of local steps, see `LocalWork`; or which derivatives clients of `KSeed` take in R^K.
        down, up: what travels.
        source: who it is by.
        options: further fields of the strategy.
        tuned: `all` weights, those of the `output` layer, or adapters: `lora`, `p-tuning` or `prompt`; a recipe may
            name other weights.
    """

    strategy: type[Any]
    local: str
    down: str
    up: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)
    tuned: str = "all"

    @property
    def pooled(self) -> bool:
        """Whether the model is a function of K coefficients."""
        return self.strategy.weights == COEFFICIENTS

    @property
    def remembers(self) -> bool:
        """Whether a client must remember the model of the round that it took part in last."""
        return self.strategy.remembers

    @property
    def backpropagates(self) -> bool:
        return self.local in (SGD, ADAM, ALL)

    @property
    def differentiates(self) -> bool:
        """Does it need a loss that has derivatives?"""
        return self.backpropagates or self.local == OUTPUT

    @property
    def adapts(self) -> bool:
        """Does it tune adapters, which are put into the model?"""
        return self.tuned not in ("all", "output")

    @property
    def lr(self) -> float:
        """η where a recipe names none: the paper's (Qin et al., 2024, Appendix C)."""
        return 3e-4 if self.local in (SGD, ADAM) else 3e-7

    def require(self, recipe: Recipe) -> None:
        """Refuse a recipe that the algorithm can't follow as a whole: a setting must not be ignored in silence.

        Raises:
            FedKSeedError: the name of what does not go with it.
        """
        name, training = recipe.training.algorithm, recipe.training
        if recipe.model.storage != "dense" and not self.pooled:
            raise FedKSeedError(
                f"{name} can't tune a model whose weights are kept {recipe.model.storage}: "
                "set [model] storage = 'dense'"
            )
        given = {
            "[asynchronous]": recipe.asynchronous is not None,
            "[clients] backpropagating": recipe.clients.backpropagating > 0,
            "[derivatives]": recipe.derivatives != Derivatives(),
            "[training] wire": training.wire not in (None, "exact"),
            "[training] server": training.server != "sgd",
        }
        if unread := [setting for setting, there in given.items() if there and setting not in self.strategy.reads]:
            raise FedKSeedError(
                f"{name} does not read {unread[0]}: leave it out, or use an algorithm whose model is K coefficients, "
                "as fedkseed"
            )
        if (self.differentiates or recipe.clients.backpropagating > 0) and training.objective != "loss":
            raise FedKSeedError(
                f"{name} takes derivatives, and {training.objective!r} has no gradient: set [training] objective = "
                "'loss', or an algorithm with zeroth-order steps alone, as 'fedkseed'"
            )

    def pool(self, recipe: Recipe) -> Pool:
        """The recipe's pool; without limit where seeds are not reused.

        One hadamard or hashed direction is a vector of independent random signs, so a pool of 2^32 of
        them is one of the rademacher family.
        """
        if self.pooled:
            return recipe.pool
        family = recipe.directions.family
        return Pool(pool_key(recipe.seed), UNLIMITED, "rademacher" if FAMILIES[family].transformed else family)

    def local_work(self, recipe: Recipe) -> LocalWork:
        """The local steps of a recipe's clients; of those that take no derivatives in R^K, where there are both."""
        training = recipe.training
        return LocalWork(
            rounds=training.rounds,
            steps_of=TWO if self.pooled else self.local,
            steps=training.steps,
            epochs=training.epochs if self.backpropagates and not self.pooled else None,
            batch_size=training.batch_size,
            lr=training.lr or self.lr,
            eps=training.eps,
            schedule=training.schedule,
            probes=training.probes,
            clip=math.inf if training.clip is None else training.clip,
        )

    def make(
        self, recipe: Recipe, run: Run, start: NDArray[np.float32] = NOTHING, tensors: tuple[tuple[int, int], ...] = ()
    ) -> Strategy[Any]:
        """The strategy as a recipe describes it.

        Args:
            start: the tuned weights, for a server that holds them; a client needs none.
            tensors: number and size of each tuned tensor; a server without a model knows none.
        """
        training, late = recipe.training, recipe.asynchronous
        with_derivatives = (self.pooled and self.local != TWO) or recipe.clients.backpropagating > 0
        settings = Settings(
            run,
            recipe.pool,
            self.local_work(recipe),
            _derivatives(recipe) if with_derivatives else None,
            start,
            tensors,
            training.wire,
            training.server,
            training.server_lr or 1.0,
        )
        if late is not None:
            limit = training.rounds if late.max_staleness is None else late.max_staleness
            settings = replace(settings, max_staleness=limit, staleness_power=late.staleness_power)
        return self.strategy.make(settings, **self.options)


def _derivatives(recipe: Recipe) -> LocalWork:
    own, training = recipe.derivatives, recipe.training
    return LocalWork(
        rounds=training.rounds,
        steps_of=own.optimizer,
        steps=own.steps or training.steps,
        epochs=None if own.steps else training.epochs,
        batch_size=training.batch_size,
        lr=own.lr,
        schedule=own.schedule or training.schedule,
    )


ALGORITHMS = {
    "fedkseed": Algorithm(KSeed, TWO, CHANGE, "scalars", "Qin et al., 2024"),
    "fedkseed-pro": Algorithm(
        KSeed, TWO, "K coefficients and probabilities", "scalars", "Qin et al., 2024", {"importance": True}
    ),
    "fedkseed-plus": Algorithm(KSeed, OUTPUT, CHANGE, CHANGE, "this project", tuned="output"),
    "fedkseed-backprop": Algorithm(KSeed, ALL, CHANGE, CHANGE, "this project"),
    "fedavg": Algorithm(Averaging, SGD, "weights", "weights", "McMahan et al., 2017"),
    "fedzo": Algorithm(Averaging, ONE, "weights", "weights", "Fang et al., 2022"),
    "fedmezo": Algorithm(Averaging, TWO, "weights", "weights", "Qin et al., 2024"),
    "fedit": Algorithm(Averaging, ADAM, "LoRA", "LoRA", "Zhang et al., 2023", tuned="lora"),
    "fedit-sgd": Algorithm(Averaging, SGD, "LoRA", "LoRA", "Qin et al., 2024", tuned="lora"),
    "fedptuning": Algorithm(Averaging, SGD, "prompt encoder", "prompt encoder", "Kuang et al., 2023", tuned="p-tuning"),
    "fedprompt": Algorithm(Averaging, SGD, "prompt", "prompt", "Kuang et al., 2023", tuned="prompt"),
    "unlimited-seeds": Algorithm(
        Replay, TWO, "all pairs missed", "scalars", "Zelikman et al., 2023", {"kind": "drawn"}
    ),
    "uplink-seeds": Algorithm(Averaging, TWO, "weights", "scalars", "Feng et al., 2023", {"uplink": "scalars"}),
    "evofed": Algorithm(
        Replay, SGD, "K coefficients a round missed", "K coefficients", "Rahimi et al., 2023", {"kind": "projected"}
    ),
    "decomfl": Algorithm(Replay, ONE, "scalars of the rounds missed", "scalars", "Li et al., 2025", {"kind": "shared"}),
    "ferret": Algorithm(
        Replay,
        SGD,
        "coefficients of the rounds missed",
        "up to K coefficients a tensor",
        "Shu et al., 2025",
        {"kind": "by tensor"},
    ),
}


def algorithm_of(name: str) -> Algorithm:
    """The row of a name; a name of the user's own code, FILE.py:NAME, runs that file.

    Raises:
        FedKSeedError: there is no such algorithm.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if not own_code.is_own(name):
        raise _unknown(name)
    return own_code.load(name, "[training] algorithm", "Algorithm", lambda row: isinstance(row, Algorithm))


def chosen(recipe: Recipe) -> Algorithm:
    """The algorithm of a recipe.

    Raises:
        FedKSeedError: there is none of its name, or the recipe has settings that it can't follow.
    """
    algorithm = algorithm_of(recipe.training.algorithm)
    algorithm.require(recipe)
    return algorithm


def require_known(recipe: Recipe) -> None:
    """Refuse a name that no algorithm has, and a lack of numbers that a known one needs; no user's code is run.

    Raises:
        FedKSeedError: the nearest names are in its text.
    """
    name, training = recipe.training.algorithm, recipe.training
    if name not in ALGORITHMS:
        if not own_code.is_own(name):
            raise _unknown(name)
        return
    if training.wire == "sign" and training.lr is None and ALGORITHMS[name].pooled and ALGORITHMS[name].local == TWO:
        raise FedKSeedError(
            "[training] wire = 'sign' moves a coefficient by lr in a step: give it, about that of 'compact' times "
            "the mean |rho| of `fedkseed rounds`"
        )


def _unknown(name: str) -> FedKSeedError:
    near = get_close_matches(name, ALGORITHMS, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return FedKSeedError(
        f"[training] algorithm: no algorithm is called {name!r}; {hint}choose one of {', '.join(ALGORITHMS)}, or name "
        "your own as 'FILE.py:NAME'"
    )
