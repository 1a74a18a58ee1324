"""The table of algorithms by name, read by README, command line, comparisons and contract tests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from ..strategies.noised import noised
from ..strategies.replay import Replay
from ..strategy import COEFFICIENTS, Masking, Noise, Settings, Strategy
from ..wire.records import Run
from . import own_code
from .schema import PrivacyTable, Recipe

UNLIMITED = 1 << 32  # size of the pool where seeds are not reused
SGD, ADAM, ONE, TWO = "sgd", "adam", "one point", "two points"
CHANGE = "K coefficients"
NOTHING = np.empty(0, np.float32)
# Derivatives in R^K: those of the loss by the K coefficients.
OUTPUT, ALL = "derivatives of the output layer", "derivatives of all layers"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table: a strategy, the local steps of its clients, and the weights that it tunes.

    Args:
        strategy: the class of its server, which makes the whole strategy.
        local: the kind of local steps, see `LocalWork`; or the derivatives in R^K that clients of `KSeed` take.
        down, up: contents of broadcasts and uploads, in words.
        source: the publication of the algorithm.
        options: further fields of its server.
        tuned: `all` weights, those of the `output` layer, or adapters: `lora`, `uni-lora`, `p-tuning` or `prompt`; a
            recipe may name other weights.
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
    def sums(self) -> bool:
        """Whether a server can step with the sum of a round's changes alone, and needs no upload by itself."""
        return not getattr(self.strategy, "needs_single_uploads", frozenset()) & self.options.items()

    @property
    def backpropagates(self) -> bool:
        """Whether local steps take derivatives through all layers."""
        return self.local in (SGD, ADAM, ALL)

    @property
    def differentiates(self) -> bool:
        """Whether clients need a loss that has derivatives."""
        return self.backpropagates or self.local == OUTPUT

    @property
    def adapts(self) -> bool:
        """Whether adapters are tuned, which have to be put into the model first."""
        return self.tuned not in ("all", "output")

    @property
    def draws(self) -> bool:
        """Whether there are directions beside the recipe's K: of 2^32, or of each round anew."""
        return not self.pooled and (self.local in (ONE, TWO) or self.strategy.remembers)

    @property
    def lr(self) -> float:
        """The learning rate η where a recipe names none: the paper's (Qin et al., 2024, Appendix C)."""
        return 3e-4 if self.local in (SGD, ADAM) else 3e-7

    def pool(self, recipe: Recipe) -> Pool:
        """The recipe's pool of K directions, or one of 2^32 where the algorithm does not reuse seeds.

        A single hadamard or hashed direction is a vector of independent random signs, so the rademacher family
        stands in for both where there are 2^32 directions. It stands in for factored ones, too, where none is drawn.
        """
        if self.pooled:
            return recipe.pool
        family = FAMILIES[recipe.directions.family]
        stands_in = family.transform is not None or family.factored is not None
        return Pool(pool_key(recipe.seed), UNLIMITED, "rademacher" if stands_in else family.name)

    def local_work(self, recipe: Recipe) -> LocalWork:
        """The local steps of a recipe's clients; in a mixed federation, of those that take no derivatives in R^K."""
        training, kind = recipe.training, TWO if self.pooled else self.local
        epochs = training.epochs if self.backpropagates and not self.pooled else None
        clip = math.inf if training.clip is None else training.clip
        same = training.model_dump(include={"rounds", "steps", "batch_size", "eps", "schedule", "probes"})
        return LocalWork(steps_of=kind, epochs=epochs, lr=training.lr or self.lr, clip=clip, **same)

    def work(self, recipe: Recipe) -> LocalWork:
        """The local steps of a recipe's clients; in a mixed federation, of those that take derivatives in R^K."""
        return derivatives_of(recipe) if self.pooled and self.differentiates else self.local_work(recipe)

    def make(
        self,
        recipe: Recipe,
        run: Run,
        start: NDArray[np.float32] = NOTHING,
        tensors: tuple[tuple[int, int], ...] = (),
        keys: Mapping[int, bytes] | None = None,
        secret: bytes = b"",
    ) -> Strategy[Any]:
        """The strategy as a recipe describes it.

        Args:
            start: the tuned weights of the base model, for a server of weights; empty elsewhere.
            tensors: number and size of each tuned tensor; empty for a server without a model.
            keys: of the clients, for a server of masked uploads.
            secret: of a server that adds noise.
        """
        training, late, secure, privacy = recipe.training, recipe.asynchronous, recipe.secure, recipe.privacy
        with_derivatives = (self.pooled and self.local != TWO) or recipe.clients.backpropagating > 0
        local, derivatives = self.local_work(recipe), derivatives_of(recipe) if with_derivatives else None
        masking = secure and Masking(secure.norm, secure.bits, secure.neighbours, keys or {})
        noise = _noise(recipe, privacy, secret) if privacy and privacy.unit == "client" else None
        others: dict[str, Any] = {"shared": recipe.directions.shared, "secure": masking, "noise": noise}
        if late is not None:
            limit = training.rounds if late.max_staleness is None else late.max_staleness
            others |= {"max_staleness": limit, "staleness_power": late.staleness_power}
        others |= {"server": training.server, "server_lr": training.server_lr or 1.0, "trust": recipe.trust.summing}
        return self.strategy_of(Settings(run, local, derivatives, start, tensors, recipe.pool, training.wire, **others))

    def strategy_of(self, settings: Settings) -> Strategy[Any]:
        """The strategy with these settings, masked or with noise where they say so."""
        strategy = self.strategy.make(settings, **self.options)
        if settings.secure is None:
            return strategy if settings.noise is None else noised(strategy, settings.noise)
        from ..strategies.masked import masked

        return masked(strategy)


def _noise(recipe: Recipe, privacy: PrivacyTable, secret: bytes) -> Noise:
    if privacy.noise is None:
        raise FedKSeedError("[privacy] noise is missing: a run fills it in, see `with_noise`")
    scale = 1.0
    if privacy.simulated is not None and recipe.clients.count is not None:
        scale = recipe.clients.cohort_of(recipe.clients.count) / privacy.simulated.cohort
    return Noise(privacy.noise, privacy.norm or 0.0, privacy.colluding, scale, secret)


def derivatives_of(recipe: Recipe) -> LocalWork:
    """The local steps of a recipe's clients that take derivatives along all K directions."""
    table, training = recipe.derivatives, recipe.training
    steps, schedule = table.steps or training.steps, table.schedule or training.schedule
    epochs = None if table.steps else training.epochs
    return LocalWork(training.rounds, table.optimizer, steps, epochs, training.batch_size, table.lr, schedule=schedule)


ALGORITHMS = {
    "fedkseed": Algorithm(KSeed, TWO, CHANGE, "scalars", "Qin et al., 2024"),
    "fedkseed-pro": Algorithm(KSeed, TWO, "K coefficients and probabilities", "scalars", "Qin et al., 2024",
                              {"importance": True}),
    "fedkseed-plus": Algorithm(KSeed, OUTPUT, CHANGE, CHANGE, "this project", tuned="output"),
    "fedkseed-backprop": Algorithm(KSeed, ALL, CHANGE, CHANGE, "this project"),
    "fedavg": Algorithm(Averaging, SGD, "weights", "weights", "McMahan et al., 2017"),
    "fedzo": Algorithm(Averaging, ONE, "weights", "weights", "Fang et al., 2022"),
    "fedmezo": Algorithm(Averaging, TWO, "weights", "weights", "Qin et al., 2024"),
    "fedit": Algorithm(Averaging, ADAM, "LoRA", "LoRA", "Zhang et al., 2023", tuned="lora"),
    "fedit-sgd": Algorithm(Averaging, SGD, "LoRA", "LoRA", "Qin et al., 2024", tuned="lora"),
    "fedunilora": Algorithm(Averaging, ADAM, "one vector", "one vector", "Li et al., 2025a", tuned="uni-lora"),
    "fedptuning": Algorithm(Averaging, SGD, "prompt encoder", "prompt encoder", "Kuang et al., 2023", tuned="p-tuning"),
    "fedprompt": Algorithm(Averaging, SGD, "prompt", "prompt", "Kuang et al., 2023", tuned="prompt"),
    "unlimited-seeds": Algorithm(Replay, TWO, "all pairs missed", "scalars", "Zelikman et al., 2023",
                                 {"kind": "drawn"}),
    "uplink-seeds": Algorithm(Averaging, TWO, "weights", "scalars", "Feng et al., 2023", {"uplink": "scalars"}),
    "evofed": Algorithm(Replay, SGD, "K coefficients a round missed", "K coefficients", "Rahimi et al., 2023",
                        {"kind": "projected"}),
    "decomfl": Algorithm(Replay, ONE, "scalars of the rounds missed", "scalars", "Li et al., 2025", {"kind": "shared"}),
    "ferret": Algorithm(Replay, SGD, "coefficients of the rounds missed", "up to K coefficients a tensor",
                        "Shu et al., 2025", {"kind": "by tensor"}),
}  # fmt: skip


def algorithm_of(name: str) -> Algorithm:
    """The table's row of a name; for a name of the user's own code, FILE.py:NAME, that file is run."""
    require_known(name)
    setting = "[training] algorithm"
    return ALGORITHMS.get(name) or own_code.load(name, setting, "Algorithm", lambda row: isinstance(row, Algorithm))


def require_known(name: str) -> None:
    """Refuse a name that no algorithm has, with the nearest known one; one of the user's own code is not looked up."""
    if name in ALGORITHMS or own_code.is_own(name):
        return
    near = get_close_matches(name, ALGORITHMS, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise FedKSeedError(
        f"[training] algorithm: no algorithm is called {name!r}; {hint}choose one of {', '.join(ALGORITHMS)}, or name "
        "your own as 'FILE.py:NAME'"
    )
