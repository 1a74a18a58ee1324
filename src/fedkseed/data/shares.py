"""Who holds what: read, hold out, encode and divide the data of a recipe."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Recipe
from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from .instructions import Encoded, encode
from .partition import dirichlet, even
from .sources import Example, read, read_folder


@dataclass(frozen=True, slots=True)
class Shares:
    """How the data fell: one list of examples a client, and what is held out."""

    clients: list[list[Encoded]]
    held_out: list[Encoded]
    too_long: int  # left out of the training examples

    def digest(self) -> str:
        """A hash over all tokens in their order, to tell whether the data is still the same."""
        text = repr([[e.tokens for e in part] for part in (*self.clients, self.held_out)])
        return hashlib.sha256(text.encode()).hexdigest()


def share_out(recipe: Recipe, tokenizer: Any) -> Shares:
    """Share out a recipe's data; the same for the same recipe.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    data, clients = recipe.data, recipe.clients
    if clients.split == "files":
        owned = [(e, owner) for owner, part in enumerate(read_folder(data.source, data.columns)) for e in part]
    else:
        owned = [(e, 0) for e in read(data.source, data.columns)]
    held, training = _hold_out([e for e, _ in owned], recipe)
    encoded = {i: encode(owned[i][0], tokenizer, data.wording) for i in (*held, *training)}
    kept = [i for i in training if len(encoded[i].tokens) <= data.max_tokens]
    limit = recipe.evaluation.max_tokens or data.max_tokens
    kept_out = [i for i in held if len(encoded[i].tokens) <= limit]
    if len(kept_out) < recipe.evaluation.examples:
        raise FedKSeedError(
            f"[evaluation] asks for {recipe.evaluation.examples} held-out examples, "
            f"{len(kept_out)} are there within the token limit; ask for fewer or raise max_tokens"
        )
    rng = generator(recipe.seed, Purpose.PARTITION)
    match clients.split:
        case "files":
            parts = _by_file([owned[i][1] for i in kept], recipe)
        case "even":
            parts = even(len(kept), clients.count, clients.min_examples, rng)
        case _:
            labels = [owned[i][0].category for i in kept]
            parts = dirichlet(labels, clients.count, clients.alpha, clients.min_examples, rng)
    order = generator(recipe.seed, Purpose.EVALUATION).permutation(len(kept_out))[: recipe.evaluation.examples]
    return Shares(
        clients=[[encoded[kept[i]] for i in part] for part in parts],
        held_out=[encoded[kept_out[i]] for i in order],
        too_long=len(training) - len(kept),
    )


def _hold_out(examples: Sequence[Example], recipe: Recipe) -> tuple[list[int], list[int]]:
    """Held-out and training examples, as indices: a whole category, or a random share."""
    chosen = recipe.data.held_out
    if isinstance(chosen, str):
        categories = sorted({e.category for e in examples})
        if chosen not in categories:
            raise FedKSeedError(
                f"[data] held_out is no category of the data: {chosen!r}; it has {', '.join(categories) or 'none'}; "
                "a number as 0.1 holds out a random share"
            )
        held = {i for i, e in enumerate(examples) if e.category == chosen}
    else:
        order = generator(recipe.seed, Purpose.HOLDOUT).permutation(len(examples))
        held = set(order[: round(chosen * len(examples))].tolist())
    return sorted(held), [i for i in range(len(examples)) if i not in held]


def _by_file(owners: Sequence[int], recipe: Recipe) -> list[list[int]]:
    """One client a file, in the order of the files' names."""
    parts = [[i for i, owner in enumerate(owners) if owner == client] for client in range(max(owners, default=-1) + 1)]
    if len(parts) != recipe.clients.count:
        raise FedKSeedError(
            f"{recipe.data.source} holds the data of {len(parts)} clients, [clients] count says {recipe.clients.count}"
        )
    if min(map(len, parts)) < recipe.clients.min_examples:
        least = min(range(len(parts)), key=lambda client: len(parts[client]))
        raise FedKSeedError(
            f"client {least} has {len(parts[least])} examples after holding out and leaving out long ones, "
            f"[clients] min_examples says {recipe.clients.min_examples}"
        )
    return parts
