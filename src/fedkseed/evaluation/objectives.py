"""Objectives that forward-only clients lower: the loss, or 1 − a score of predictions or of whole answers.

A step compares the numbers of two forward passes and needs no gradient of them: docs/objectives.md.
"""

from collections.abc import Callable, Sequence
from inspect import isroutine
from reprlib import repr as shortened
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from ..data.batches import IGNORED, Batch
from ..data.sources import Example
from ..errors import FedKSeedError
from ..models.loss import batch_loss, response_logits
from ..recipe import own_code
from .evaluate import Score, respond, rouge_l

Objective: TypeAlias = Callable[
    [nn.Module, Any, Batch], float
]  # of a model, its tokenizer and a batch; lower is better


def objective_of(name: str, max_new_tokens: int) -> Objective:
    """The objective that a recipe calls `name`.

    Args:
        name: `loss`, `accuracy`, `exact match`, `rouge`, or a function that is a `Score`:
            `FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`. It is loaded, which runs its file.
        max_new_tokens: the largest number of tokens in a generated answer.

    Raises:
        FedKSeedError: no function has this name.
    """
    if name == "loss":
        return lambda model, tokenizer, batch: batch_loss(model, batch)
    if name == "accuracy":
        return lambda model, tokenizer, batch: 1 - accuracy(model, batch)
    score = score_of(name, "[training] objective")

    def objective(model: nn.Module, tokenizer: Any, batch: Batch) -> float:
        """Return 1 − the mean score of the answers; all is done inside this call, since two calls may take turns."""
        answers = respond(model, tokenizer, [e.tokens[: e.prompt] for e in batch.examples], max_new_tokens)
        return 1 - float(np.mean(score(answers, [e.example for e in batch.examples])))

    return objective


@torch.inference_mode()
def accuracy(model: nn.Module, batch: Batch) -> float:
    """Share of a batch's response tokens that the model ranks first, given the right tokens before them."""
    predictions, labels = response_logits(model, batch)
    return float((predictions.argmax(-1) == labels).sum() / (labels != IGNORED).sum())


@torch.inference_mode()
def accuracies(model: nn.Module, batch: Batch) -> list[float]:
    """The same share for each example of a batch."""
    predictions, labels = response_logits(model, batch)
    return ((predictions.argmax(-1) == labels).sum(1) / (labels != IGNORED).sum(1)).tolist()


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """A score of 1 for each answer that equals the response apart from surrounding space, 0 for others."""
    return [float(a.strip() == e.response.strip()) for a, e in zip(answers, examples, strict=True)]


def rouge(answers: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """Rouge-L F1 of each answer, as the package rouge-score computes it."""
    return [rouge_l(e.response, a) for a, e in zip(answers, examples, strict=True)]


SCORES: dict[str, Score] = {"exact match": exact_match, "rouge": rouge}


def score_of(name: str, setting: str) -> Score:
    """The score of answers that a recipe calls `name`; what it returns is checked.

    Args:
        setting: the recipe's key, as `[training] objective`, for error messages.

    Raises:
        FedKSeedError: no function has this name.
    """
    score = SCORES.get(name) or own_code.load(name, setting, "function", isroutine)
    return lambda answers, examples: _numbers(score(answers, examples), f"{setting} = {name!r}", answers)


def _numbers(scores: Any, source: str, answers: Sequence[str]) -> list[float]:
    """Scores as numbers, one an answer; anything else is refused."""
    try:
        array = np.asarray(scores)
    except (TypeError, ValueError):  # lists of different lengths, a tensor on a GPU
        array = np.empty(0)
    if array.shape != (len(answers),) or array.dtype.kind not in "biuf":
        raise FedKSeedError(
            f"{source} has to return a list of numbers, one for each of {len(answers)} answers; "
            f"it returned {shortened(scores)}"
        )
    if not np.isfinite(array).all():
        k = int(np.isfinite(array).argmin())
        raise FedKSeedError(
            f"{source} scored the answer {shortened(answers[k])} {array[k]}; "
            "return a finite number, the lowest score for an answer that can't be judged"
        )
    return array.astype(float).tolist()
