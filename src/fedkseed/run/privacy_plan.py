"""The noise of a recipe with [privacy], from its epsilon and the plan of its rounds, and what they have spent."""

import hashlib
import math
import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FedKSeedError, needs_extra
from ..files import read_table, write_table
from ..randomness import Purpose, generator
from ..recipe.schema import PrivacyTable, Recipe
from ..secure.accounting import epsilon_of, noise_for
from .cohort import IN_TURNS, cohort

if TYPE_CHECKING:  # noise needs `cryptography`
    from ..local.private_steps import Private

SLACK = 1e-9  # of ε, relative: for the rounding of its computation
NOISE_KEY = "noise.key"  # in a run's directory: who has it can take the noise off the run's sums
SIZE = 32  # bytes of a secret


def with_noise(recipe: Recipe, clients: int) -> Recipe:
    """The recipe with the noise that its epsilon needs, and the rounds in which one client takes part at most.

    Args:
        clients: number of clients of the federation.

    Raises:
        FedKSeedError: the recipe names another number of such rounds than its plan has.
    """
    privacy = recipe.privacy
    if privacy is None:
        return recipe
    times = participations(recipe, privacy, clients, recipe.training.rounds)
    if privacy.times not in (None, times):
        raise FedKSeedError(
            f"[privacy] times = {privacy.times}, and in the plan of {recipe.training.rounds} rounds a client takes "
            f"part in up to {times}: leave times out"
        )
    follows: dict[str, Any] = {"times": times}
    if privacy.unit == "client" and privacy.noise is None and privacy.epsilon is not None:
        follows["noise"] = noise_for(privacy.epsilon, privacy.delta, times)
    return recipe.having(privacy=follows)


def participations(recipe: Recipe, privacy: PrivacyTable, clients: int, rounds: int) -> int:
    """The largest number of rounds in which one client takes part, of a run's first rounds."""
    size, draw, simulated = recipe.clients.cohort_of(clients), recipe.clients.draw, privacy.simulated
    if simulated is not None:
        return math.ceil(rounds / (simulated.clients // simulated.cohort))
    if draw == IN_TURNS:  # a client takes part once in each turn that has begun
        return math.ceil(rounds / (clients // size))
    times = Counter(client for done in range(rounds) for client in cohort(recipe.seed, done, clients, size, draw))
    return max(times.values(), default=0)


def private_steps(recipe: Recipe, number: int, examples: int, steps: int, secret: bytes) -> "Private | None":
    """The noise of a client's own local steps; None where no single example is protected.

    In a round of τ steps an example takes part in at most ⌈τ / ⌊n / B⌋⌉ (`private_batches`), in a run in that many for
    each round of the client.

    Args:
        number, examples: the client's, n of them.
        steps: τ, of the client in a round.
        secret: of the run; empty: none is known, which is refused.

    Raises:
        FedKSeedError: a package or a secret is missing.
    """
    if (privacy := recipe.protecting("example")) is None:
        return None
    if privacy.epsilon is None or privacy.norm is None or privacy.times is None:
        raise FedKSeedError("[privacy] times is missing: a run fills it in, see `with_noise`")
    with needs_extra("[privacy] needs", "privacy"):
        from ..local.private_steps import Private
    a_pass = examples // min(recipe.training.batch_size, examples)
    noise = noise_for(privacy.epsilon, privacy.delta, privacy.times * math.ceil(steps / a_pass))
    of_client = hashlib.sha256(b"fedkseed noise of client %d\n" % number + secret).digest() if secret else b""
    return Private(noise, privacy.norm, of_client)


def spent(recipe: Recipe, clients: int, rounds: int) -> float | None:
    """ε of the client that has taken part most often after a number of rounds; None where there is no noise."""
    privacy = recipe.privacy
    if privacy is None or (noise := noise_of_a_round(privacy)) is None:
        return None
    return epsilon_of(noise, participations(recipe, privacy, clients, rounds), privacy.delta)


def noise_of_a_round(privacy: PrivacyTable) -> float | None:
    """The noise of one round for one unit, of an example in all steps in which it takes part; None: there is none."""
    if privacy.unit == "client" or privacy.epsilon is None or privacy.times is None:
        return privacy.noise
    return noise_for(privacy.epsilon, privacy.delta, privacy.times)


def exhausted_budget(recipe: Recipe, clients: int, rounds: int) -> str | None:
    """The reason why a run must end before it has done a number of rounds; None if it may go on."""
    privacy = recipe.privacy
    if privacy is None or privacy.epsilon is None:
        return None
    if (epsilon := spent(recipe, clients, rounds)) is None or epsilon <= privacy.epsilon * (1 + SLACK):
        return None
    return (
        f"round {rounds} would spend epsilon = {epsilon:.4g}, and [privacy] epsilon is {privacy.epsilon:g} at delta = "
        f"{privacy.delta:g}: it ends with {rounds - 1} rounds; in a new one take more noise, fewer rounds, more clients"
    )


def about(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """The promise that a tuned model carries: at most this ε for one unit, after a number of rounds."""
    privacy = recipe.privacy
    if privacy is None:
        return {}
    promise: dict[str, Any] = {"unit": privacy.unit, "epsilon": privacy.epsilon, "delta": privacy.delta}
    if (noise := noise_of_a_round(privacy)) is not None and privacy.times is not None:
        promise |= {"noise": noise, "rounds of one client": min(privacy.times, rounds)}
        promise["epsilon"] = epsilon_of(noise, min(privacy.times, rounds), privacy.delta)
    if privacy.simulated is not None:
        promise["simulated"] = privacy.simulated.model_dump()
    return {"privacy": promise}


def new_secret(recipe: Recipe) -> bytes:
    """The secret from which a run's noise follows; empty where it has none.

    It is not derived from the recipe's seed, since adapters name that. A simulation that stands for another federation
    protects nobody, and its noise follows from the seed, so that others find the same.
    """
    if recipe.privacy is None:
        return b""
    if recipe.privacy.simulated is not None:
        return generator(recipe.seed, Purpose.NOISE).bytes(SIZE)
    return secrets.token_bytes(SIZE)


def kept_secret(recipe: Recipe, directory: Path, drawn: bytes = b"", *, reads: bool = False) -> bytes:
    """The secret of a run's noise, kept in its directory.

    Args:
        drawn: the secret to keep, if there is none yet; empty: a new one.
        reads: whether none is made, and none is needed where clients add the noise.

    Raises:
        FedKSeedError: the file holds something else, or is missing and must not be made.
    """
    if recipe.privacy is None or (reads and recipe.protecting("example")):
        return b""
    path = directory / NOISE_KEY
    if not path.exists():
        if reads:
            raise FedKSeedError(f"{path} is missing: without the secret of its noise a round can't be computed again")
        write_table(path, {"secret": (drawn or new_secret(recipe)).hex()})
    table = read_table(path)
    with suppress(KeyError, TypeError, ValueError):
        if len(secret := bytes.fromhex(table["secret"])) == SIZE:
            return secret
    raise FedKSeedError(f"{path} holds no secret of {SIZE} bytes; without it the run's noise can't be made again")
