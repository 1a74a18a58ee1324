"""Objectives that forward-only clients lower: the loss, or 1 − a score of predictions or of whole answers.

A step compares the numbers of two forward passes and needs no gradient of them: docs/evaluation.md.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from ..data.batches import Batch
from ..models.loss import batch_loss
from .evaluate import answers_to
from .metrics import accuracy, score_of

Objective: TypeAlias = Callable[[nn.Module, Any, Batch], float]  # model, its tokenizer, batch; lower is better


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
        answers = answers_to(model, tokenizer, batch.examples, max_new_tokens)
        return 1 - float(np.mean(score(answers, [e.example for e in batch.examples])))

    return objective
