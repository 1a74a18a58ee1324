"""Scores of a tuned model, and of its base model, on any file of examples."""

from collections.abc import Sequence
from dataclasses import asdict

from torch import nn

from ..data.federated import whole_set
from ..evaluation.evaluate import evaluate
from ..evaluation.metrics import metrics_of
from ..evaluation.statistics import NOT_EVALUATED, Evaluation, require_finite
from ..recipe import schema
from ..recipe.own_code import absolute
from ..recipe.reading import typed
from ..run.progress import Progress
from .load import TunedModel


def measure(
    tuned: TunedModel,
    data: str,
    metrics: Sequence[str],
    progress: Progress,
    *,
    examples: int | str = "all",
    generated: int = 0,
    max_tokens: int | None = None,
    beside_base: bool = False,
) -> tuple[Evaluation, Evaluation]:
    """Scores of the base model, empty unless it is asked for, and of the tuned one.

    The wording is that of the run, and so are the columns of the data and the lengths of texts, where the run is there.
    A model of which nobody knows that it was tuned has the wording that a run on the data would have.

    Args:
        data: a file or folder of examples, read as [data] source is.
        metrics: names as in [evaluation] metrics; the loss is always measured.
        examples: number of rows to draw, or `all`.
        generated: number of answers to write, for metrics that score them.
        max_tokens: longer examples are left out; None: the run's limit.

    Raises:
        FedKSeedError: the data or a model can't be read, no metric has a name, or a loss is not finite.
    """
    recipe = tuned.store.load_recipe() if tuned.store is not None else schema.Recipe(model=schema.ModelTable(name=""))
    table = recipe.evaluation.model_dump(include={"rouge", "max_new_tokens", "batch_size"})
    table |= {"metrics": [absolute(name) for name in metrics], "examples": examples, "generated": generated}
    settings, tokenizer = typed(schema.EvaluationTable, table), tuned.tokenizer()
    rows = {"source": data} | (asdict(tuned.wording) if tuned.worded else {})
    if limit := max_tokens or recipe.evaluation.max_tokens:  # else the run's, or the default
        rows["max_tokens"] = limit
    recipe = recipe.having(data=rows, evaluation=settings)
    held_out = whole_set(recipe, tokenizer, progress.note)
    asked = metrics_of(settings, held_out.options)
    answers = settings.generated if asked.written else 0
    sizes = {"max_new_tokens": settings.max_new_tokens, "batch_size": settings.batch_size}

    def scores(model: nn.Module, what: str) -> Evaluation:
        progress.begin(what, asked.work(held_out.examples, answers))
        evaluation = evaluate(
            model, tokenizer, held_out.examples, metrics=asked, generated=answers, on_progress=progress.advance, **sizes
        )
        require_finite(evaluation, f"the {what}", tuned.dtype)
        return evaluation

    before = scores(tuned.load_base(), "base model") if beside_base else NOT_EVALUATED
    return before, scores(tuned.load(), "tuned model")
