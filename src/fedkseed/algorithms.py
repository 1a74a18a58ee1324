"""The algorithms by name: README, command line and contract tests read this table."""

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
        importance=importance,
        clip=training.clip,
    )


ALGORITHMS: dict[str, Callable[[Training, Run], KSeed]] = {
    "fedkseed": partial(kseed, importance=False),
    "fedkseed-pro": partial(kseed, importance=True),
}
