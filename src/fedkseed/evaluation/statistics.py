"""Means with their standard errors, and the scores of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.error:.4f}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one model on held-out examples, which are the same and in the same order for every model."""

    losses: list[float]  # nats a response token, one an example
    rouge: list[float]  # Rouge-L F1, one a generated example
    empty: list[bool]  # whether the output was blank


NOT_EVALUATED = Evaluation([], [], [])  # the result of a party without held-out data


def estimate(values: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """Mean and standard error; the error of fewer than two values is infinite."""
    array = np.asarray(values, float)
    return Estimate(
        float(array.mean()), float(array.std(ddof=1)) / sqrt(array.size) if array.size > 1 else float("inf")
    )


def paired_change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Mean change on the same examples and its standard error: far tighter than two separate means."""
    return estimate(np.asarray(after, float) - np.asarray(before, float))
