"""Scores that an earlier run has already: those of the same base model on the same held-out rows.

Runs of an experiment differ in their method or its rate, not in what they begin with. Where all of it is equal, an
evaluation of the base model says the same, bit for bit, and takes as long as that of any other.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from ..recipe.rules import checked_algorithm
from ..recipe.schema import Recipe
from .store import Store

OF_THE_RUN = "directions"  # the one fact of a run's identity that says nothing of its base model and rows
PARTS = ("seed", "model", "data", "clients", "evaluation", "peft")  # of a recipe: what its first evaluation is made of


def base_scores(recipe: Recipe, identity: Mapping[str, str], runs: Iterable[Path]) -> dict[str, Any] | None:
    """The base model's evaluation by the first of other runs that has it, as fields of `Evaluation`; None if none has.

    Adapters that are put into the model are part of it, and those of two algorithms differ.

    Args:
        identity: the digests of the run's base model and data, which the other's have to equal.
        runs: directories; one that can't be read has nothing.
    """
    ours = _start(recipe)
    for directory in runs:
        try:
            store = Store(directory, looks=True)
            same = _start(store.load_recipe()) == ours and _same(store.recall("identity"), identity)
            if same and (scores := store.evaluations().get(0)) is not None:
                return scores
        except FedKSeedError:  # it costs the time of an evaluation, no more
            continue
    return None


def _start(recipe: Recipe) -> list[Any]:
    adapters = recipe.training.algorithm if checked_algorithm(recipe).adapts else None
    return [adapters, *(getattr(recipe, part) for part in PARTS)]


def _same(theirs: Mapping[str, str] | None, ours: Mapping[str, str]) -> bool:
    return theirs is not None and all(theirs.get(name) == ours[name] for name in ours if name != OF_THE_RUN)
