"""Optimisers on K coefficients, for local steps and for the server: their whole state is a few kilobytes."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import require_choice

NOTHING = np.zeros(0)
BETA1, BETA2 = 0.9, 0.999
Moments: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]  # m and v of Adam, (K,) each; of SGD (0,)


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

    def __post_init__(self) -> None:
        require_choice("optimiser", self.kind, ("sgd", "adam"))

    def init(self, size: int) -> Moments:
        """The moments before the first step."""
        return (NOTHING, NOTHING) if self.kind == "sgd" else (np.zeros(size), np.zeros(size))

    def step(self, moments: Moments, gradient: NDArray[np.float64], t: int) -> tuple[NDArray[np.float64], Moments]:
        """The step, shape (K,), and the moments after it; t counts from 1."""
        if self.kind == "sgd":
            return gradient, moments
        first = BETA1 * moments[0] + (1 - BETA1) * gradient
        second = BETA2 * moments[1] + (1 - BETA2) * gradient * gradient
        root = np.sqrt(second / (1 - BETA2**t))
        step = first / (1 - BETA1**t) / np.maximum(root + 1e-8 * root.max(), np.finfo(np.float64).tiny)
        return step, (first, second)
