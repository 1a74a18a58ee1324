"""The algorithms by name: README, command line, comparisons and contract tests read this table."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import Recipe
from .directions import Pool
from .directions.pool import TRANSFORMED
from .messages import Run
from .randomness import pool_key
from .strategies.averaging import Averaging
from .strategies.kseed import KSeed
from .strategies.replay import Replay
from .strategy import Strategy

UNLIMITED = 1 << 32  # seeds


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row: a strategy, and what it is a strategy for.

    Args:
        strategy: its class.
        options: the fields that make the strategy this algorithm.
        tuned: `all` weights, or adapters: `lora`, `p-tuning` or `prompt`.
        lr: η where a recipe names none: the paper's (Qin et al., 2024, Appendix C).
        down, up: what travels.
        source: who it is by.
    """

    strategy: type[Any]
    options: dict[str, Any]
    down: str
    up: str
    source: str
    tuned: str = "all"
    lr: float = 3e-7

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
        return self.options.get("local") in ("sgd", "adam") or self.options.get("kind") in ("projected", "by tensor")

    def pool(self, recipe: Recipe) -> Pool:
        """The recipe's pool; without limit where seeds are not reused.

        One hadamard or hashed direction is a vector of independent random signs, so a pool of 2^32 of
        them is one of the rademacher family.
        """
        if self.pooled:
            return recipe.pool
        family = recipe.directions.family
        return Pool(pool_key(recipe.seed), UNLIMITED, "rademacher" if family in TRANSFORMED else family)

    def make(
        self, recipe: Recipe, run: Run, start: NDArray[np.float32], tensors: tuple[tuple[int, int], ...]
    ) -> Strategy:
        """The strategy as a recipe describes it.

        Args:
            start: the tuned weights, for a server that holds them; a client needs none.
            tensors: number and size of each tuned tensor.
        """
        training = recipe.training
        common = {
            "run": run,
            "rounds": training.rounds,
            "steps": training.steps,
            "lr": training.lr or self.lr,
            "eps": training.eps,
            "schedule": training.schedule,
            "probes": training.probes,
            "clip": math.inf if training.clip is None else training.clip,
        }
        if self.strategy is KSeed:
            return KSeed(**common, **self.options)
        common |= {"epochs": training.epochs if self.backpropagates else None, "batch_size": training.batch_size}
        if self.strategy is Averaging:
            return Averaging(**common, start=start, tensors=tensors, **self.options)
        return Replay(
            **common, pool=recipe.pool, tensors=len(tensors), server_lr=training.server_lr, **self.options
        )  # fmt: skip


ALGORITHMS = {
    "fedkseed": Algorithm(KSeed, {"importance": False}, "K coefficients", "pairs", "Qin et al., 2024"),
    "fedkseed-pro": Algorithm(
        KSeed, {"importance": True}, "K coefficients and probabilities", "pairs", "Qin et al., 2024"
    ),
    "fedavg": Algorithm(Averaging, {"local": "sgd"}, "weights", "weights", "McMahan et al., 2017", lr=3e-4),
    "fedzo": Algorithm(Averaging, {"local": "one point"}, "weights", "weights", "Fang et al., 2022"),
    "fedmezo": Algorithm(Averaging, {"local": "two points"}, "weights", "weights", "Qin et al., 2024"),
    "fedit": Algorithm(Averaging, {"local": "adam"}, "LoRA", "LoRA", "Zhang et al., 2023", "lora", 3e-4),
    "fedit-sgd": Algorithm(Averaging, {"local": "sgd"}, "LoRA", "LoRA", "Qin et al., 2024", "lora", 3e-4),
    "fedptuning": Algorithm(
        Averaging, {"local": "sgd"}, "prompt encoder", "prompt encoder", "Kuang et al., 2023", "p-tuning", 3e-4
    ),
    "fedprompt": Algorithm(Averaging, {"local": "sgd"}, "prompt", "prompt", "Kuang et al., 2023", "prompt", 3e-4),
    "unlimited-seeds": Algorithm(Replay, {"kind": "drawn"}, "all pairs missed", "pairs", "Zelikman et al., 2023"),
    "uplink-seeds": Algorithm(
        Averaging, {"local": "two points", "uplink": "pairs"}, "weights", "pairs", "Feng et al., 2023"
    ),
    "evofed": Algorithm(
        Replay, {"kind": "projected"}, "K coefficients a round missed", "K coefficients", "Rahimi et al., 2023", lr=3e-4
    ),
    "decomfl": Algorithm(
        Replay, {"kind": "shared", "points": 1}, "scalars of the rounds missed", "scalars", "Li et al., 2025"
    ),
    "ferret": Algorithm(
        Replay,
        {"kind": "by tensor"},
        "coefficients of the rounds missed",
        "up to K coefficients a tensor",
        "Shu et al., 2025",
        lr=3e-4,
    ),
}
