"""The mean of a run's models after its last rounds: of K numbers each, where the model is a function of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import FedKSeedError
from ..recipe.algorithms import algorithm_of
from ..recipe.schema import Recipe
from .store import Store


def mean_state(store: Store, recipe: Recipe, kind: type[Any], done: int | None = None, last: int = 1) -> Any:
    """The state after `done` rounds with c = (c_done + … + c_(done − last + 1)) / last; None before the first commit.

    Weights are w₀ + Σ_k c_k z_k, so these are the mean of the weights after each of these rounds.

    Args:
        kind: the class of the run's states, `ServerPart.state`.
        done: None: all.

    Raises:
        FedKSeedError: fewer rounds are done, or the algorithm's model is not K coefficients.
    """
    state = store.state(kind, done)
    if last == 1 or state is None:
        return state
    require_coefficients(recipe, last)
    if last > state.round:
        raise FedKSeedError(f"--ensemble {last}: {store.directory} has {state.round} rounds to take the mean of")
    each: list[Any] = [store.state(kind, done) for done in range(state.round - last + 1, state.round + 1)]
    return replace(state, coefficients=np.mean([state.coefficients for state in each], axis=0))


def require_coefficients(recipe: Recipe, last: int) -> None:
    """Refuse a mean of rounds of an algorithm whose model is not K coefficients."""
    name = recipe.training.algorithm
    if last > 1 and not algorithm_of(name).pooled:
        raise FedKSeedError(f"--ensemble {last} takes the mean of K coefficients, and a model of {name} is not of them")
