"""Optimisers on K coefficients, for local steps and for the server: their whole state is a few kilobytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from .schedules import require_choice

KINDS = ("sgd", "adam")
NOTHING = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments that Adam keeps from step to step; with plain SGD the arrays are empty."""

    first: NDArray[np.float64]  # (K,) or (0,), m
    second: NDArray[np.float64]  # (K,) or (0,), v


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimiser, which makes a step from a gradient g; the caller multiplies the step by η.

        sgd    g
        adam   m ← β1 m + (1 − β1) g, v ← β2 v + (1 − β2) g²;   m̂ / (√v̂ + ε)

    with m̂ = m / (1 − β1^t) and v̂ = v / (1 − β2^t) in step t. ε is 1e-8 times the largest √v̂: coefficients have
    no scale of their own.

    Source: Kingma and Ba, 2015; on a server: Reddi et al., 2021, https://arxiv.org/abs/2003.00295
    """

    kind: str = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        require_choice("optimiser", self.kind, KINDS)
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise FedKSeedError(f"an optimiser's {name} must be at least 0 and less than 1, got {value}")

    def init(self, size: int) -> Moments:
        """The moments before the first step."""
        return Moments(NOTHING, NOTHING) if self.kind == "sgd" else Moments(np.zeros(size), np.zeros(size))

    def step(self, moments: Moments, gradient: NDArray[np.float64], t: int) -> tuple[NDArray[np.float64], Moments]:
        """The step, shape (K,), and the moments after it; t counts from 1."""
        if self.kind == "sgd":
            return gradient, moments
        first = self.beta1 * moments.first + (1 - self.beta1) * gradient
        second = self.beta2 * moments.second + (1 - self.beta2) * gradient * gradient
        root = np.sqrt(second / (1 - self.beta2**t))
        step = first / (1 - self.beta1**t) / np.maximum(root + 1e-8 * root.max(), np.finfo(np.float64).tiny)
        return step, Moments(first, second)


SGD = Optimizer()
