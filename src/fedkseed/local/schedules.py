"""Checks and learning-rate schedules that strategies and local steps share."""

import math
from numbers import Integral, Real

from ..errors import FedKSeedError, require_choice

SCHEDULES = ("constant", "linear", "cosine")


def scheduled(lr: float, schedule: str, round_: int, rounds: int) -> float:
    """The learning rate η of a round, counted from 0.

    It is never 0, so that the state after the last round can still be broadcast, for clients to load it.
    """
    done = min(round_ / rounds, 1.0)
    if schedule == "linear":
        return lr * max(1 - done, 1e-6)
    if schedule == "cosine":
        return lr * max((1 + math.cos(math.pi * done)) / 2, 1e-6)
    return lr


def require_settings(schedule: str, **counts: int) -> None:
    """Refuse an unknown schedule and counts below 1."""
    for name, value in counts.items():
        if not isinstance(value, Integral) or value < 1:
            least = "at least 1" if isinstance(value, Integral) else "a whole number"
            raise FedKSeedError(f"{name} must be {least}, got {value!r}")
    require_choice("schedule", schedule, SCHEDULES)


def require_positive(**numbers: float) -> None:
    """Refuse what is no number above 0, such as a rate at which a step would stand still or go back."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 < number < math.inf:
            raise FedKSeedError(f"{name} must be a positive number, got {number!r}")
