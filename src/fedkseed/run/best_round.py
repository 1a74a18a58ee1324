"""The best round of a run by its validation part, and its early end: no better round for long, or signs of divergence.

All follow from the recipe and the run's reports and evaluations alone, so that a run that was stopped and resumed
chooses and ends like one that was not. A training loss gives a suspicion of divergence, and the held-out loss decides.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FedKSeedError
from ..evaluation.statistics import Evaluation, paired_change, title_of
from ..local.zeroth_order import mean_loss
from ..recipe import schema
from ..recipe.schema import VALIDATION

ERRORS = 3.0  # a rise of more than these standard errors is no chance: with normal errors, 1 of 700 evaluations has it
LEAST = 0.1  # nats: a run may get a little worse on rows that no client has, and better afterwards
EVALUATIONS = 2  # in a row
ROUNDS = 3  # in a row, whose training losses are a suspicion, and from one look at the held-out loss to the next
RISE = 0.5  # nats over the first round; cohorts differ, too, and so this is a suspicion and no more


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
    sign = 1 if metric == "loss" else -1  # the others are better the higher they are
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


def suspicious(losses: Sequence[float | None], evaluated: int) -> bool:
    """Whether the training loss has risen so that the held-out loss should be looked at.

    Args:
        losses: of all rounds, the median over their clients; None or NaN where there was no finite one.
        evaluated: number of rounds before the last evaluation.
    """
    of_rounds = [math.nan if loss is None else loss for loss in losses]
    if len(of_rounds) - evaluated < ROUNDS or len(of_rounds) <= ROUNDS or not math.isfinite(of_rounds[0]):
        return False
    return not any(loss <= of_rounds[0] + RISE for loss in of_rounds[-ROUNDS:])  # NaN is not


def require_movement(rounds: Sequence[tuple[float | None, int]], planned: int) -> None:
    """Refuse a run whose first rounds had no step with a finite loss: its model would be the base model for ever.

    Args:
        rounds: the loss of each round so far, and the number of its steps that were left out.
        planned: number of rounds of the whole run.

    Raises:
        FedKSeedError: that is so after `ROUNDS` rounds, or after all if they are fewer.
    """
    if len(rounds) != min(ROUNDS, planned):
        return
    if all(skipped and (loss is None or not math.isfinite(loss)) for loss, skipped in rounds):
        raise FedKSeedError(
            f"nothing was learned: none of the {sum(skipped for _, skipped in rounds):,} steps of the first "
            f"{len(rounds)} rounds had a finite loss, or one that a step changes. With float16 take bfloat16 or "
            "float32; else look at the model's weights and at the training rows"
        )


def lowers_loss(recipe: schema.Recipe) -> bool:
    """Whether a run is meant to lower the loss; one for accuracy may raise it."""
    return recipe.training.objective == "loss" and recipe.evaluation.best in (None, "loss")


def diverged(evaluations: Mapping[int, Mapping[str, Any]], by_loss: bool = True) -> str | None:
    """The sign by which a run's model has become worse than its base model, in words; None: there is none.

    Args:
        evaluations: of the run, as the store keeps them.
        by_loss: whether a higher loss is a sign, see `lowers_loss`; one that is not finite always is.
    """
    losses = {done: Evaluation.of(scores).losses for done, scores in sorted(evaluations.items())}
    base = losses.pop(0, [])
    if not base or not losses or not math.isfinite(mean_loss(base)):
        return None
    last = max(losses)
    if not math.isfinite(latest := mean_loss(losses[last])):
        return f"after {last} rounds the held-out loss is {latest}"
    changes = [paired_change(base, now) for now in list(losses.values())[-EVALUATIONS:]]
    rises = [change.mean > max(LEAST, ERRORS * change.error) for change in changes]
    if not by_loss or len(rises) < EVALUATIONS or not all(rises):
        return None
    return (
        f"after {last} rounds the held-out loss is {latest:.4f}, {changes[-1]} above the base model's, and "
        "so it was in the evaluation before"
    )


def lowest_round(evaluations: Mapping[int, Mapping[str, Any]]) -> int:
    """The number of rounds after which the held-out loss was lowest, the first of equals; 0 is the base model."""
    losses = {done: mean_loss(Evaluation.of(scores).losses) for done, scores in evaluations.items()}
    return min(losses, key=lambda done: (losses[done] if math.isfinite(losses[done]) else math.inf, done))
