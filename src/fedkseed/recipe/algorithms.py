"""The algorithms by name: README, command line, comparisons and contract tests read this table."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..directions import FAMILIES, Pool
from ..errors import FedKSeedError
from ..local.optimizers import Optimizer
from ..local.work import LocalWork
from ..randomness import pool_key
from ..strategies.averaging import Averaging
from ..strategies.kseed import KSeed
from ..strategies.replay import Replay
from ..strategy import Strategy
from ..wire.records import Run
from .schema import Derivatives, Recipe

UNLIMITED = 1 << 32  # seeds
SGD, ADAM, ONE, TWO = "sgd", "adam", "one point", "two points"
CHANGE = "K coefficients"
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
        """Is the model a function of K coefficients?"""
        return self.strategy is KSeed

    @property
    def replays(self) -> bool:
        """Do clients remember the model that they saw last?"""
        return self.strategy is Replay

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

    def require_read(self, recipe: Recipe) -> None:
        """Refuse settings that only algorithms with K coefficients read: they would be ignored in silence.

        Raises:
            FedKSeedError: there is one.
        """
        settings = {
            "[asynchronous]": recipe.asynchronous is not None,
            "[clients] backpropagating": recipe.clients.backpropagating > 0,
            "[derivatives]": recipe.derivatives != Derivatives(),
            "[training] wire": recipe.training.wire not in (None, "exact"),
            "[training] server": recipe.training.server != "sgd",
        }
        for name, given in settings.items():
            if given and not self.pooled:
                raise FedKSeedError(
                    f"{recipe.training.algorithm} does not read {name}: leave it out, or use an algorithm whose model "
                    "is K coefficients, as fedkseed"
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

    def make(
        self, recipe: Recipe, run: Run, start: NDArray[np.float32], tensors: tuple[tuple[int, int], ...]
    ) -> Strategy:
        """The strategy as a recipe describes it.

        Args:
            start: the tuned weights, for a server that holds them; a client needs none.
            tensors: number and size of each tuned tensor.
        """
        training = recipe.training
        settings: dict[str, Any] = {
            "rounds": training.rounds,
            "steps": training.steps,
            "lr": training.lr or self.lr,
            "eps": training.eps,
            "schedule": training.schedule,
            "probes": training.probes,
            "clip": math.inf if training.clip is None else training.clip,
        }
        if self.pooled:
            late = recipe.asynchronous
            if late is not None:
                limit = training.rounds if late.max_staleness is None else late.max_staleness
                settings |= {"max_staleness": limit, "staleness_power": late.staleness_power}
            with_derivatives = self.local != TWO or recipe.clients.backpropagating > 0
            options: dict[str, Any] = self.options | ({"wire": training.wire} if training.wire else {})
            return KSeed(
                run,
                **settings,
                derivatives=_derivatives(recipe) if with_derivatives else None,
                server=Optimizer(training.server),
                server_lr=training.server_lr or 1.0,
                **options,
            )
        epochs = training.epochs if self.backpropagates else None
        local = LocalWork(steps_of=self.local, epochs=epochs, batch_size=training.batch_size, **settings)
        if self.replays:
            return Replay(run, recipe.pool, len(tensors), local, **self.options, server_lr=training.server_lr or 1.0)
        return Averaging(run, start, tensors, local, **self.options)


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
