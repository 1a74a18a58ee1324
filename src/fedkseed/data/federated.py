"""Division of a recipe's data among clients: read, hold out, encode, share out."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from ..recipe.schema import Recipe
from .batches import Encoded
from .natural_instructions import subsample
from .partition import dirichlet, even
from .reading import Example, is_here, read, read_folder
from .wording import Wording, cut, encode_all

MOST_OPTIONS = 32  # different responses of a category: more are hardly labels, and a choice reads all of them
Owned: TypeAlias = tuple[Example, int]  # an example and the number of the file or task that it comes from


@dataclass(frozen=True, slots=True)
class Found:
    """A recipe's examples before tokenisation, held-out and training ones apart."""

    held_out: list[Example]
    training: list[Owned]
    owners: int  # number of files or tasks
    too_small: int = 0


@dataclass(frozen=True, slots=True)
class Shares:
    """A recipe's data after division: one list of examples a client, and the held-out examples."""

    clients: list[list[Encoded]]
    held_out: list[Encoded]
    too_long: int  # left out of the training examples
    too_small: int = 0  # training tasks with too few examples to be a client
    options: dict[str, list[str]] = field(default_factory=dict)  # category -> responses that the metric `choice` offers

    def digest(self) -> str:
        """A hash over all tokens in their order, by which a run recognises that its data is still the same."""
        return digest([*self.clients, self.held_out])


def digest(parts: Sequence[Sequence[Encoded]]) -> str:
    """A hash over all tokens of some lists of examples, in their order."""
    return hashlib.sha256(repr([[e.tokens for e in part] for part in parts]).encode()).hexdigest()


def share_out(recipe: Recipe, tokenizer: Any) -> Shares:
    """Divide a recipe's data among clients; the same recipe always gives the same division.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    found, limit = _find(recipe), recipe.data.max_tokens
    encoded = _encode([e for e, _ in found.training], limit, recipe, tokenizer)
    kept = [(e, owner) for e, (_, owner) in zip(encoded, found.training, strict=True) if e is not None]
    evaluated = _evaluated(found.held_out, recipe, tokenizer)
    parts = _divide(kept, found.owners, recipe)
    recipe.clients.cohort_of(len(parts))
    return Shares(
        clients=[[kept[i][0] for i in part] for part in parts],
        held_out=evaluated,
        too_long=len(found.training) - len(kept),
        too_small=found.too_small,
        options=_options(evaluated, [*found.held_out, *(e for e, _ in found.training)], recipe),
    )


def own_share(recipe: Recipe, tokenizer: Any) -> list[Encoded]:
    """Training examples of a client with its own file: those that `split = "files"` gives the client of that file.

    Raises:
        FedKSeedError: the file can't be read, or too little is left of it.
    """
    kept = [e for e in read(recipe.data.source, recipe.data.columns) if e.category != recipe.data.held_out]
    encoded = [e for e in _encode(kept, recipe.data.max_tokens, recipe, tokenizer) if e is not None]
    if len(encoded) < recipe.clients.min_examples:
        raise FedKSeedError(
            f"the client has {len(encoded)} examples after holding out and leaving out long ones, "
            f"[clients] min_examples says {recipe.clients.min_examples}"
        )
    return encoded


def own_held_out(recipe: Recipe, tokenizer: Any) -> tuple[list[Encoded], dict[str, list[str]]]:
    """Examples that a server evaluates on, held-out rows of its own file or folder, and the options of their answers.

    A server without data has none.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    source, columns = recipe.data.source, recipe.data.columns
    if not is_here(source):
        return [], {}
    path = Path(source).expanduser()
    parts = read_folder(source, columns) if path.is_dir() else [read(source, columns)]
    held_out, _ = _hold_out([(e, owner) for owner, part in enumerate(parts) for e in part], recipe)
    evaluated = _evaluated(held_out, recipe, tokenizer)
    return evaluated, _options(evaluated, (e for part in parts for e in part), recipe)


def _evaluated(held_out: Sequence[Example], recipe: Recipe, tokenizer: Any) -> list[Encoded]:
    """As many held-out examples as the recipe asks for, drawn from those that are not too long."""
    encoded = _encode(held_out, recipe.evaluation.max_tokens or recipe.data.max_tokens, recipe, tokenizer)
    kept = [e for e in encoded if e is not None]
    asked = len(kept) if recipe.evaluation.examples == "all" else recipe.evaluation.examples
    if len(kept) < asked:
        raise FedKSeedError(
            f"[evaluation] asks for {asked} held-out examples, "
            f"{len(kept)} are there within the token limit; ask for fewer or raise max_tokens"
        )
    return [kept[i] for i in generator(recipe.seed, Purpose.EVALUATION).permutation(len(kept))[:asked]]


def _options(evaluated: Sequence[Encoded], rows: Iterable[Example], recipe: Recipe) -> dict[str, list[str]]:
    """The different responses of all rows of each evaluated category, sorted; none without the metric `choice`."""
    if "choice" not in recipe.evaluation.measured:
        return {}
    found: dict[str, set[str]] = {e.example.category: set() for e in evaluated}
    for row in rows:
        if row.category in found:
            found[row.category].add(row.response)
    if len(found) > 1 and all(len(responses) == 1 for responses in found.values()):  # the label is the category
        every = set[str]().union(*found.values())
        found = dict.fromkeys(found, every)
    for category, responses in found.items():
        if not 2 <= len(responses) <= MOST_OPTIONS:
            where = f"the category {category!r} has" if category else "rows without a category have"
            raise FedKSeedError(
                f"[evaluation] metrics: 'choice' is made among the different responses of a category, 2 to "
                f"{MOST_OPTIONS} of them; {where} {len(responses):,}. Give each classification task a category of its "
                "own ([data] columns names its field) and hold out rows of these, or leave 'choice' out"
            )
    return {category: sorted(responses) for category, responses in found.items()}


def _find(recipe: Recipe) -> Found:
    """Read the data and separate the held-out examples."""
    data, clients = recipe.data, recipe.clients
    match clients.split:
        case "tasks":
            drawn = subsample(
                data.source,
                recipe.seed,
                protocol=data.protocol,
                max_characters=data.max_tokens,
                least=clients.min_examples,
            )
            owned = [(e, owner) for owner, task in enumerate(drawn.clients) for e in task.examples]
            held_out = [e for task in drawn.held_out for e in task.examples]
            return Found(held_out, owned, len(drawn.clients), len(drawn.too_small))
        case "files":
            parts = read_folder(data.source, data.columns)
        case _:
            parts = [read(data.source, data.columns)]
    return Found(*_hold_out([(e, owner) for owner, part in enumerate(parts) for e in part], recipe), len(parts))


def _hold_out(owned: Sequence[Owned], recipe: Recipe) -> tuple[list[Example], list[Owned]]:
    """Held-out and training examples; a whole category is held out, or a random share."""
    chosen = recipe.data.held_out
    if isinstance(chosen, str):
        categories = sorted({e.category for e, _ in owned})
        if chosen not in categories:
            raise FedKSeedError(
                f"[data] held_out is no category of the data: {chosen!r}; it has {', '.join(categories) or 'none'}; "
                "a number as 0.1 holds out a random share"
            )
        held = {i for i, (e, _) in enumerate(owned) if e.category == chosen}
    else:
        order = generator(recipe.seed, Purpose.HOLDOUT).permutation(len(owned))
        held = set(order[: round(chosen * len(owned))].tolist())
    return [owned[i][0] for i in sorted(held)], [pair for i, pair in enumerate(owned) if i not in held]


def _encode(examples: Sequence[Example], limit: int, recipe: Recipe, tokenizer: Any) -> list[Encoded | None]:
    """Examples as tokens; None for an example that is left out.

    An example over the limit is left out, but the protocol `official-code` cuts it and leaves it out only where no
    response remains.
    """
    encoded = encode_all(examples, tokenizer, Wording(recipe.data.template, recipe.data.separator))
    if recipe.data.protocol == "official-code":
        return [cut(e, limit) if e.prompt < limit else None for e in encoded]
    return [e if len(e.tokens) <= limit else None for e in encoded]


def _divide(kept: Sequence[tuple[Encoded, int]], owners: int, recipe: Recipe) -> list[list[int]]:
    """The indices of each client's examples."""
    clients, rng = recipe.clients, generator(recipe.seed, Purpose.PARTITION)
    match clients.split, clients.count:
        case "dirichlet", int(count):
            labels = [e.example.category for e, _ in kept]
            return dirichlet(labels, count, clients.alpha, clients.min_examples, rng)
        case "even", int(count):
            return even(len(kept), count, clients.min_examples, rng)
        case _:
            return _by_owner([owner for _, owner in kept], owners, recipe)


def _by_owner(owner_of: Sequence[int], owners: int, recipe: Recipe) -> list[list[int]]:
    """The indices of each client's examples, one client a file or task; a task with only long examples is no client."""
    clients = recipe.clients
    parts: list[list[int]] = [[] for _ in range(owners)]
    for i, owner in enumerate(owner_of):
        parts[owner].append(i)
    if clients.split == "tasks":
        parts = [part for part in parts if part]
    if not parts or clients.count not in (None, len(parts)):
        raise FedKSeedError(
            f"{recipe.data.source} holds the data of {len(parts)} clients"
            + (f", [clients] count says {clients.count}" if clients.count else "; lower [clients] min_examples")
        )
    if clients.split == "files" and min(map(len, parts)) < clients.min_examples:
        least = min(range(len(parts)), key=lambda client: len(parts[client]))
        raise FedKSeedError(
            f"client {least} has {len(parts[least])} examples after holding out and leaving out long ones, "
            f"[clients] min_examples says {clients.min_examples}"
        )
    return parts
