"""An objective of your own: right answers, and short ones. In a recipe:

    [training]
    objective = "objective.py:brief"

Clients that run the model forward lower 1 minus the mean of what it returns; it needs no gradient.
"""

from collections.abc import Sequence

from fedkseed.data.sources import Example


def brief(answers: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """Up to 1 for each answer that the model has written; higher is better."""
    return [
        (example.response.lower() in answer.lower()) / (1 + len(answer.split()) / 50)
        for answer, example in zip(answers, examples, strict=True)
    ]
