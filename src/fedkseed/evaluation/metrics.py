"""The metrics that a recipe names, as functions: docs/evaluation.md."""

from collections.abc import Mapping, Sequence

from ..recipe.schema import EvaluationTable
from .evaluate import Metrics, Score, rouge_l
from .objectives import accuracies, score_of


def metrics_of(settings: EvaluationTable, options: Mapping[str, Sequence[str]]) -> Metrics:
    """The metrics of a recipe; its own functions are loaded, which runs their files.

    Args:
        options: of `choice`: category -> possible responses, from `data.federated`.

    Raises:
        FedKSeedError: no function has a name.
    """

    def scored(name: str) -> Score:
        if name == "rouge":
            return lambda answers, examples: [
                rouge_l(e.response, a, settings.rouge) for a, e in zip(answers, examples, strict=True)
            ]
        return score_of(name, "[evaluation] metrics")

    return Metrics(
        predicted={"accuracy": accuracies} if "accuracy" in settings.measured else {},
        written={name: scored(name) for name in settings.written},
        options=options,
    )
