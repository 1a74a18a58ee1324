"""The best round of a run by its validation part, and the end of a run that has not improved for long.

Both follow from the recipe and the run's evaluations alone, so that a run that was stopped and resumed chooses and ends
like one that was not.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..evaluation.statistics import Evaluation, title_of
from ..recipe import schema
from ..recipe.schema import VALIDATION

LOWER = ("loss",)  # metrics that are better the lower they are


def best_round(settings: schema.EvaluationTable, evaluations: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The number of rounds after which the model was best, the first of equals; 0 is the base model.

    Args:
        evaluations: of the run, as the store keeps them.

    Returns:
        None where the recipe chooses none, or nothing was evaluated: the last round's model counts then.
    """
    metric = settings.best
    if metric is None or not evaluations:
        return None
    means = {done: Evaluation.of(scores).sets[VALIDATION].means[metric] for done, scores in evaluations.items()}
    sign = 1 if metric in LOWER else -1
    return min(means, key=lambda done: (sign * means[done] if math.isfinite(means[done]) else math.inf, done))


def exhausted(settings: schema.EvaluationTable, evaluations: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The reason for which a run ends early: no better evaluation in `patience` of them; None: it goes on."""
    best = best_round(settings, evaluations)
    if best is None or settings.patience is None:
        return None
    since = sum(done > best for done in evaluations)
    if since < settings.patience:
        return None
    return (
        f"stopped early after {max(evaluations)} rounds: in {since} evaluations the {title_of(settings.best or '')} of "
        f"the validation part was not better than after {best} rounds ([evaluation] patience = {settings.patience})"
    )
