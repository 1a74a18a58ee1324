"""The metrics beside the loss, as functions of predictions or of written answers: docs/evaluation.md."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import isroutine
from reprlib import repr as shortened
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from ..data.batches import IGNORED, Batch, Encoded
from ..data.layouts import Example
from ..errors import FedKSeedError, needs_extra
from ..models.loss import response_logits
from ..recipe import own_code
from ..recipe.schema import EvaluationTable

Score: TypeAlias = Callable[[list[str], list[Example]], Sequence[float]]  # answers, examples; higher is better


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of an evaluation, by the names that a recipe has for them."""

    predicted: Mapping[str, Callable[[nn.Module, Batch], Sequence[float]]] = field(default_factory=dict)
    written: Mapping[str, Score] = field(default_factory=dict)  # scores of generated answers
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)  # for `choice`: category -> possible responses

    def work(self, held_out: Sequence[Encoded], generated: int) -> int:
        """Number of rows that an evaluation puts through the model."""
        chosen = sum(len(self.options.get(e.example.category, ())) for e in held_out)
        return len(held_out) * (1 + len(self.predicted)) + chosen + generated


def metrics_of(settings: EvaluationTable, options: Mapping[str, Sequence[str]]) -> Metrics:
    """The metrics of a recipe; its own functions are loaded, which runs their files.

    Args:
        options: for `choice`: category -> possible responses, from `data.held_out`.

    Raises:
        FedKSeedError: no function has a name.
    """
    written = {name: score_of(name, "[evaluation] metrics") for name in settings.written}
    if "rouge" in written:
        written["rouge"] = partial(rouge, package=settings.rouge)
    return Metrics({"accuracy": accuracies} if "accuracy" in settings.measured else {}, written, options)


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


def rouge(answers: Sequence[str], examples: Sequence[Example], package: str = "rouge-score") -> list[float]:
    """Rouge-L F1 of each answer, see `rouge_l`."""
    return [rouge_l(e.response, a, package) for a, e in zip(answers, examples, strict=True)]


def rouge_l(reference: str, output: str, package: str = "rouge-score") -> float:
    """Rouge-L F1 as one of two packages defines it.

    `rouge-score` is the standard: the longest common subsequence of two texts' words, of their letters a to z and
    digits, without case. It is computed here as in version 0.1.2, which has no wheel and brings NLTK. `rouge` 1.0.1
    is what the official code of FedKSeed used: it is case-sensitive, works on sets of words sentence by sentence, and
    so gives very different numbers; an empty output scores 0.
    """
    if package == "rouge-score":
        wanted, got = (re.findall(r"[a-z0-9]+", text.lower()) for text in (reference, output))
        common = [0] * (len(got) + 1)  # lengths of what the words of `wanted` so far share with those of `got` so far
        for word in wanted:
            before, common = common, [0]
            for k, other in enumerate(got):
                common.append(before[k] + 1 if word == other else max(before[k + 1], common[k]))
        if not common[-1]:
            return 0.0
        precision, recall = common[-1] / len(got), common[-1] / len(wanted)
        return 2 * precision * recall / (precision + recall)
    with needs_extra("Rouge-L of the package `rouge` needs", "rouge"):
        from rouge import Rouge

    try:
        scores: Any = Rouge().get_scores(output, reference)
        return scores[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):  # nothing but punctuation; a text of more than about 900 words
        return 0.0


SCORES: dict[str, Score] = {"exact match": exact_match, "rouge": rouge}


def score_of(name: str, setting: str) -> Score:
    """The score of answers that a recipe calls `name`; what it returns is checked.

    Args:
        setting: the recipe's key, as `[training] objective`, for error messages.

    Raises:
        FedKSeedError: no function has this name.
    """
    score, source = SCORES.get(name) or own_code.load(name, setting, "function", isroutine), f"{setting} = {name!r}"

    def checked(answers: list[str], examples: list[Example]) -> list[float]:
        scores = score(answers, examples)
        try:
            array = np.asarray(scores)
        except (TypeError, ValueError):  # lists of different lengths, a tensor on a GPU
            array = np.empty(0)
        if array.shape != (len(answers),) or array.dtype.kind not in "biuf":
            asked = f"a list of numbers, one for each of {len(answers)} answers"
            raise FedKSeedError(f"{source} has to return {asked}; it returned {shortened(scores)}")
        if not np.isfinite(array).all():
            k = int(np.isfinite(array).argmin())
            raise FedKSeedError(
                f"{source} scored the answer {shortened(answers[k])} {array[k]}; return a finite number, the lowest "
                "score for an answer that can't be judged"
            )
        return array.astype(float).tolist()

    return checked
