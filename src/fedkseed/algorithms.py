"""The algorithms by name: README, command line and contract tests read this table."""

import math
from collections.abc import Callable
from functools import partial

from .config import Training
from .messages import Run
from .strategies.kseed import KSeed


def kseed(training: Training, run: Run, *, importance: bool) -> KSeed:
    """FedKSeed as a recipe describes it."""
    return KSeed(
        run,
        rounds=training.rounds,
        steps=training.steps,
        lr=training.lr,
        eps=training.eps,
        schedule=training.schedule,
        probes=training.probes,
        importance=importance,
        clip=math.inf if training.clip is None else training.clip,
    )


ALGORITHMS: dict[str, Callable[[Training, Run], KSeed]] = {
    "fedkseed": partial(kseed, importance=False),
    "fedkseed-pro": partial(kseed, importance=True),
}
