"""Division of a recipe's data among clients: read, hold out, encode, share out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from ..recipe.schema import VALIDATION, Recipe
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
class HeldOut:
    """A held-out set: its examples, and the responses that the metric `choice` offers for each category of them."""

    examples: list[Encoded]
    options: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shares:
    """A recipe's data after division: one list of examples a client, and the held-out examples."""

    clients: list[list[Encoded]]
    held_out: list[Encoded]
    too_long: int  # left out of the training examples
    too_small: int = 0  # training tasks with too few examples to be a client
    options: dict[str, list[str]] = field(default_factory=dict)  # of `held_out`, see `HeldOut`
    sets: dict[str, HeldOut] = field(default_factory=dict)  # the validation part, and further held-out sets, by name

    def digest(self) -> str:
        """A hash over all tokens in their order, by which a run recognises that its data is still the same."""
        return digest([*self.clients, self.held_out, *(one.examples for one in self.sets.values())])


def digest(parts: Sequence[Sequence[Encoded]]) -> str:
    """A hash over all tokens of some lists of examples, in their order."""
    return sha256(repr([[e.tokens for e in part] for part in parts]).encode()).hexdigest()


def share_out(recipe: Recipe, tokenizer: Any) -> Shares:
    """Divide a recipe's data among clients; the same recipe always gives the same division.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    found, limit = _find(recipe), recipe.data.max_tokens
    every = [*found.held_out, *(e for e, _ in found.training)]
    categories, training = _apart(found.training, recipe)
    encoded = _encode([e for e, _ in training], limit, recipe, tokenizer)
    kept = [(e, owner) for e, (_, owner) in zip(encoded, training, strict=True) if e is not None]
    parts = _divide(kept, found.owners, recipe)
    recipe.clients.cohort_of(len(parts))
    clients, kept_back = _keep_back([[kept[i][0] for i in part] for part in parts], recipe)
    held_out, sets = _held_out(found.held_out, categories, kept_back, every, recipe, tokenizer)
    _require_unseen({one.name: sets[one.name] for one in recipe.evaluation.sets or () if one.path}, clients)
    return Shares(
        clients=clients,
        held_out=held_out.examples,
        too_long=len(training) - len(kept),
        too_small=found.too_small,
        options=held_out.options,
        sets=sets,
    )


def own_share(recipe: Recipe, tokenizer: Any) -> list[Encoded]:
    """Training examples of a client with its own file: those that `split = "files"` gives the client of that file.

    Raises:
        FedKSeedError: the file can't be read, or too little is left of it.
    """
    held_out = {recipe.data.held_out, *recipe.evaluation.categories}
    kept = [e for e in read(recipe.data.source, recipe.data.columns) if e.category not in held_out]
    encoded = [e for e in _encode(kept, recipe.data.max_tokens, recipe, tokenizer) if e is not None]
    if len(encoded) < recipe.clients.min_examples:
        raise FedKSeedError(
            f"the client has {len(encoded)} examples after holding out and leaving out long ones, "
            f"[clients] min_examples says {recipe.clients.min_examples}"
        )
    return encoded


def own_held_out(recipe: Recipe, tokenizer: Any) -> tuple[HeldOut, dict[str, HeldOut]]:
    """Examples that a server evaluates on, held-out rows of its own file or folder; and its further sets, by name.

    A server without data has none.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    if not is_here(recipe.data.source):
        return HeldOut([]), {}
    every = _rows(recipe.data.source, recipe)
    held_out, others = _hold_out([(e, 0) for e in every], recipe)
    categories, _ = _apart(others, recipe)
    return _held_out(held_out, categories, [], every, recipe, tokenizer)


def number_of(portion: float, total: int) -> int:
    """The number of rows that a recipe's portion of `total` rows means: itself, or a share of them, rounded."""
    return portion if isinstance(portion, int) else round(portion * total)


def _rows(source: str, recipe: Recipe) -> list[Example]:
    """All rows of a file or of a folder of files."""
    columns = recipe.data.columns
    if Path(source).expanduser().is_dir():
        return [e for part in read_folder(source, columns) for e in part]
    return read(source, columns)


def _apart(owned: Sequence[Owned], recipe: Recipe) -> tuple[dict[str, list[Example]], list[Owned]]:
    """The rows of each category that is a set of its own, and the others, on which clients may train."""
    found: dict[str, list[Example]] = {name: [] for name in recipe.evaluation.categories}
    for example, _ in owned:
        if example.category in found:
            found[example.category].append(example)
    if empty := [name for name, rows in found.items() if not rows]:
        raise FedKSeedError(
            f"[evaluation.sets] held_out is no category of the data beside those of [data] held_out: {empty[0]!r}; "
            f"there are {', '.join(sorted({e.category for e, _ in owned})) or 'none'}"
        )
    return found, [pair for pair in owned if pair[0].category not in found]


def _keep_back(clients: Sequence[list[Encoded]], recipe: Recipe) -> tuple[list[list[Encoded]], list[Encoded]]:
    """The examples on which each client trains, and those that are kept back from them for a set of the clients' own.

    A client's draw depends on the seed and the client alone.
    """
    (portion,) = [one.clients for one in recipe.evaluation.sets or () if one.clients is not None] or [None]
    if portion is None:
        return list(clients), []
    training, kept_back = [], []
    for number, share in enumerate(clients):
        count = max(1, number_of(portion, len(share)))
        if count >= len(share):
            raise FedKSeedError(
                f"[evaluation.sets] clients = {portion} keeps back {count} of the {len(share)} examples of client "
                f"{number}, and none is left to train on: keep back fewer, or raise [clients] min_examples"
            )
        order = generator(recipe.seed, Purpose.KEPT_BACK, number).permutation(len(share))
        kept_back += [share[i] for i in sorted(order[:count])]
        training.append([share[i] for i in sorted(order[count:])])
    return training, kept_back


def _held_out(
    rows: Sequence[Example],
    categories: Mapping[str, Sequence[Example]],
    kept_back: Sequence[Encoded],
    every: Sequence[Example],
    recipe: Recipe,
    tokenizer: Any,
) -> tuple[HeldOut, dict[str, HeldOut]]:
    """The held-out set that is always there, and the others by name: the validation part first.

    Args:
        rows: the rows of the first.
        every: all rows of the data, whose responses are options.
    """
    limit, asked = recipe.evaluation.max_tokens or recipe.data.max_tokens, recipe.evaluation.examples

    def short(examples: Sequence[Example]) -> list[Encoded]:
        return [e for e in _encode(examples, limit, recipe, tokenizer) if e is not None]

    def held_out(examples: list[Encoded], source: Iterable[Example]) -> HeldOut:
        return HeldOut(examples, _options(examples, source, recipe))

    whole = _drawn(short(rows), asked, recipe.seed, "[evaluation]")
    count = number_of(recipe.evaluation.validation or 0, len(whole))
    if recipe.evaluation.validation is not None and not 2 <= count <= len(whole) - 2:
        raise FedKSeedError(
            f"[evaluation] validation = {recipe.evaluation.validation} takes {count} of {len(whole)} held-out "
            "examples: that part and the part that is reported need 2 or more each"
        )
    reported = len(whole) - count
    sets = {VALIDATION: held_out(whole[reported:], every)} if count else {}
    for one in recipe.evaluation.sets or ():
        source = every if one.path is None else _rows(one.path, recipe)
        there = list(kept_back) if one.clients is not None else short(categories.get(one.held_out or "", source))
        most = one.examples or ("all" if asked == "all" else min(asked, len(there)))
        label, who = int.from_bytes(sha256(one.name.encode()).digest()[:8]), f"[evaluation.sets] {one.name!r}"
        drawn = _drawn(there, most, recipe.seed, who, label)
        if len(drawn) < 2:
            raise FedKSeedError(f"{who}: a mean with its error needs 2 examples, {len(drawn)} are there; give it more")
        sets[one.name] = held_out(drawn, source)
    return held_out(whole[:reported], every), sets


def _drawn(there: Sequence[Encoded], asked: int | str, seed: int, who: str, *labels: int) -> list[Encoded]:
    """As many examples as are asked for, drawn from those that are there."""
    count = len(there) if asked == "all" else int(asked)
    if len(there) < count:
        raise FedKSeedError(
            f"{who} asks for {count} held-out examples, "
            f"{len(there)} are there within the token limit; ask for fewer or raise max_tokens"
        )
    return [there[i] for i in generator(seed, Purpose.EVALUATION, *labels).permutation(len(there))[:count]]


def _require_unseen(sets: Mapping[str, HeldOut], clients: Sequence[Sequence[Encoded]]) -> None:
    """Refuse a file with rows that clients train on: they would be taken for unseen."""
    trained = {e.example for share in clients for e in share}
    for name, held_out in sets.items():
        if seen := sum(e.example in trained for e in held_out.examples):
            raise FedKSeedError(
                f"[evaluation.sets] {name!r}: clients train on {seen} of its {len(held_out.examples)} examples; remove "
                "these rows from one of the two, or take held_out or clients in place of the file"
            )


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
