"""Checks of a server's message against the recipe that its clients follow: steps, cohort and turn."""

from typing import Any

import numpy as np

from ....errors import FedKSeedError
from ....local.work import LocalWork
from ....recipe.schema import Recipe
from ....run import digest_chain as chain
from ....run.cohort import cohort
from ....wire.records import Broadcast, Secured, Survivors


def broadcast_digest(message: Any, encoded: bytes) -> bytes:
    """SHA-256 of the round's broadcast, with which a message comes or about which it asks."""
    match message:
        case Secured():
            return chain.digest(message.broadcast)
        case Survivors():
            return message.broadcast
        case _:
            return chain.digest(encoded)


def require_recipes_steps(message: Any, recipe: Recipe, local: LocalWork) -> None:
    """Refuse a message that asks for other steps than its recipe, on which the owner's policy was applied.

    Args:
        local: the steps as the recipe describes them.

    Raises:
        FedKSeedError: it does.
    """
    training = recipe.training
    if message.round >= training.rounds:
        raise FedKSeedError(f"the recipe has {training.rounds} rounds, and the message is of round {message.round + 1}")
    if isinstance(message, Broadcast):
        asked = message.steps, message.probes, message.wire, message.lr, message.eps, message.clip
        steps = training.steps, training.probes, training.wire or "compact"
        expected = *steps, local.learning_rate(message.round), local.eps, float(np.float32(local.clip))
        if asked != expected:
            raise FedKSeedError(
                f"the message asks for steps, probes, wire, lr, eps and clip {asked}, its recipe says {expected}"
            )


def require_cohort(message: Secured | Survivors, recipe: Recipe, count: int) -> None:
    """Refuse a masked round of other clients than the recipe's seed draws.

    Else a server that works with two clients, of however many, could ask any third for a round with these two.

    Raises:
        FedKSeedError: its clients are others.
    """
    members, drawn = message.members.tolist(), _drawn(message.round, recipe, count)
    if members != drawn:
        raise FedKSeedError(
            f"the server says that clients {members[:10]} are in round {message.round + 1}, and of {count} clients the "
            f"recipe's seed draws {drawn[:10]}: it may have put this client among ones that work with it"
        )


def require_turn(client: int, round_: int, recipe: Recipe, count: int) -> None:
    """Refuse a round for which the recipe's seed does not draw the client.

    Its noise is for the rounds of the plan: each further one would say more of its examples than was promised.

    Raises:
        FedKSeedError: it does not.
    """
    if client not in (drawn := _drawn(round_, recipe, count)):
        raise FedKSeedError(
            f"client {client} is asked in round {round_ + 1}, and of {count} clients the recipe's seed draws "
            f"{drawn[:10]}: [privacy] has no noise for rounds out of turn"
        )


def _drawn(round_: int, recipe: Recipe, count: int) -> list[int]:
    return cohort(recipe.seed, round_, count, recipe.clients.cohort_of(count), recipe.clients.draw)
