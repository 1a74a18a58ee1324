"""What forward-only clients lower: the loss, or 1 − a score of predictions or of whole answers.

Two forward passes compare two numbers, and nothing asks for a gradient of them: docs/objectives.md.
"""

from collections.abc import Callable, Sequence
from inspect import isroutine
from reprlib import repr as shortened
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from ..data.batches import IGNORED, Batch
from ..data.reading import Example
from ..errors import FedKSeedError
from ..models.loss import batch_loss, response_logits
from ..recipe import own_code
from .evaluate import respond, rouge_l

Objective: TypeAlias = Callable[
    [nn.Module, Any, Batch], float
]  # of a model, its tokenizer and a batch; lower is better
Score: TypeAlias = Callable[[list[str], list[Example]], Sequence[float]]  # answers, their examples; higher is better


def objective_of(name: str, max_new_tokens: int) -> Objective:
    """What a recipe calls by `name`.

    Args:
        name: `loss`, `accuracy`, `exact match`, `rouge`, or a function that is a `Score`:
            `FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`. It is loaded, which runs its file.
        max_new_tokens: where a written answer ends.

    Raises:
        FedKSeedError: there is no such function.
    """
    if name == "loss":
        return lambda model, tokenizer, batch: batch_loss(model, batch)
    if name == "accuracy":
        return lambda model, tokenizer, batch: 1 - accuracy(model, batch)
    score = SCORES.get(name) or _loaded(name)

    def objective(model: nn.Module, tokenizer: Any, batch: Batch) -> float:
        """1 − the mean score of the answers; all of it where `loss` is: two such calls may take turns."""
        answers = respond(model, tokenizer, [e.tokens[: e.prompt] for e in batch.examples], max_new_tokens)
        return 1 - _mean(score(answers, [e.example for e in batch.examples]), name, answers)

    return objective


@torch.inference_mode()
def accuracy(model: nn.Module, batch: Batch) -> float:
    """Share of the response tokens of a batch that the model would choose after the right ones before them."""
    predictions, labels = response_logits(model, batch)
    return float((predictions.argmax(-1) == labels).sum() / (labels != IGNORED).sum())


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """1 for an answer that is the response, but for space around it, else 0."""
    return [float(a.strip() == e.response.strip()) for a, e in zip(answers, examples, strict=True)]


def rouge(answers: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """Rouge-L F1, as the package rouge-score has it."""
    return [rouge_l(e.response, a) for a, e in zip(answers, examples, strict=True)]


SCORES: dict[str, Score] = {"exact match": exact_match, "rouge": rouge}


def _loaded(name: str) -> Score:
    """A user's function."""
    return own_code.load(name, "[training] objective", "function", isroutine)


def _mean(scores: Any, name: str, answers: Sequence[str]) -> float:
    """The mean of a number for each answer; anything else is refused."""
    try:
        array = np.asarray(scores)
    except (TypeError, ValueError):  # lists of unlike length, a tensor on a GPU
        array = np.empty(0)
    if array.shape != (len(answers),) or array.dtype.kind not in "biuf":
        raise FedKSeedError(
            f"[training] objective = {name!r} has to return a list of numbers, one for each of {len(answers)} answers; "
            f"it returned {shortened(scores)}"
        )
    if not np.isfinite(array).all():
        k = int(np.isfinite(array).argmin())
        raise FedKSeedError(
            f"[training] objective = {name!r} scored the answer {shortened(answers[k])} {array[k]}; "
            "return a finite number, the lowest score for an answer that can't be judged"
        )
    return float(array.mean(dtype=float))
