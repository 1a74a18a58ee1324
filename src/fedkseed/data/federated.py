"""Division of a recipe's data among clients: read, hold out, encode, share out."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from ..recipe.schema import HELD_OUT, VALIDATION, DataTable, EvaluationTable, Recipe
from .batches import Encoded
from .file_formats import is_saved
from .layouts import Example
from .natural_instructions import subsample
from .partition import dirichlet, even
from .sources import Reader, SourcePart, is_here, require_columns
from .wording import Wording, cut, encode_all, packed

MOST_OPTIONS = 32  # different responses of a category: more are hardly labels, and a choice reads all of them
USUAL, USUAL_SHARE = DataTable.model_fields["held_out"].default, 0.1  # a category of Dolly; the share in its place
MOST = EvaluationTable.model_fields["examples"].default  # held-out examples
MOST_LINES = 12  # files on which a line each is said; of more, the rest is summed up
Note: TypeAlias = Callable[[str], None]  # says a line to whoever watches
Drawn = TypeVar("Drawn")


@dataclass(frozen=True, slots=True)
class Owned:
    """An example and where it comes from."""

    example: Example
    owner: int = 0  # number of the file, folder, task or named client
    part: SourcePart | None = None  # the file; None for a task
    row: int = 0  # number of the example in `part`


@dataclass(frozen=True, slots=True)
class Found:
    """A recipe's examples before tokenisation, held-out and training ones apart."""

    held_out: list[Owned]
    training: list[Owned]
    owners: list[str]  # names of files, folders, tasks or clients; one without a name where a split shares rows out
    too_small: int = 0
    parts: list[SourcePart] = field(default_factory=list)  # the files


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out set: its examples, and the responses that the metric `choice` offers for each category of them."""

    examples: list[Encoded]
    options: dict[str, list[str]] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)  # the client of each example, in the set of the clients' own rows


@dataclass(frozen=True, slots=True)
class ClientShares:
    """A recipe's data after division: one list of examples a client, and the held-out examples."""

    clients: list[list[Encoded]]
    held_out: list[Encoded]
    too_long: int  # left out of the training examples
    too_small: int = 0  # training tasks with too few examples to be a client
    options: dict[str, list[str]] = field(default_factory=dict)  # of `held_out`, see `HeldOut`
    sets: dict[str, HeldOut] = field(default_factory=dict)  # the validation part, and further held-out sets, by name
    names: list[str] = field(default_factory=list)  # of the clients, where files, folders, tasks or a column name them
    template: str | None = None  # of the examples, where it is not the recipe's: see `_worded`

    def digest(self) -> str:
        """A hash over all tokens in their order, by which a run recognises that its data is still the same."""
        return digest([*self.clients, self.held_out, *(one.examples for one in self.sets.values())])

    def name(self, client: int) -> str:
        """The name of a client, or its number where it has none."""
        return _name(self.names, client)


def _name(names: Sequence[str], client: int) -> str:
    return names[client] if names else f"client {client}"


def _adapted(recipe: Recipe, reported: Sequence[Encoded]) -> list[str]:
    """Lines on defaults in whose place the data has others: the held-out category, and the number of examples."""
    said, usual = [], any(one.example.category == USUAL for one in reported)
    if recipe.data.format == "rows" and recipe.data.held_out == USUAL and not usual:
        said.append(f"the data has no category {USUAL!r}: a share of {USUAL_SHARE:g} of its rows is held out")
    if recipe.evaluation.examples == MOST and 0 < len(reported) < MOST:
        said.append(f"all {len(reported)} held-out examples are evaluated: {MOST} is the default, and they are fewer")
    return said


def digest(parts: Sequence[Sequence[Encoded]]) -> str:
    """A hash over all tokens of some lists of examples, in their order."""
    return sha256(repr([[e.tokens for e in part] for part in parts]).encode()).hexdigest()


def share_out(recipe: Recipe, tokenizer: Any, note: Note = lambda line: None) -> ClientShares:
    """Divide a recipe's data among clients; the same recipe always gives the same division.

    Args:
        note: is given a line on each file.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    found = _find(recipe)
    wording = _worded(recipe, found.parts, tokenizer)
    every = [one.example for one in (*found.held_out, *found.training)]
    categories, training = _apart(found.training, recipe)
    kept, too_long = _owned(training, recipe, tokenizer, wording)
    for line in _lines(found.parts, training, too_long, found.held_out, recipe):
        note(line)
    parts, names = _divide(kept, found.owners, recipe)
    recipe.clients.cohort_of(len(parts))
    clients, kept_back = _keep_back([[kept[i][0] for i in part] for part in parts], names, recipe)
    for line in _seen(found.held_out, training, [e for e, _ in kept_back], clients, recipe):
        note(line)
    held_out, sets = _held_out(found.held_out, categories, kept_back, every, recipe, tokenizer, wording, note)
    _require_unseen({one.name: sets[one.name] for one in recipe.evaluation.further if one.path}, clients)
    chosen_by = sets[VALIDATION].examples if VALIDATION in sets else []
    for line in _adapted(recipe, [*held_out.examples, *chosen_by]):
        note(line)
    return ClientShares(
        clients=clients,
        held_out=held_out.examples,
        too_long=len(too_long),
        too_small=found.too_small,
        options=held_out.options,
        sets=sets,
        names=names,
        template=wording.template if wording.template != recipe.data.template else None,
    )


def own_share(
    recipe: Recipe, tokenizer: Any, note: Note = lambda line: None, kept_back: float = 0.0
) -> tuple[list[Encoded], HeldOut]:
    """Training examples of a client with its own file, and some of those that it never trains on.

    Without the second, of which there are [evaluation] examples at most, the first are those that `split = "files"`
    gives the client of that file.

    Args:
        note: is given a line on the file.
        kept_back: share of the rows that is not trained on, see `_set_aside`.

    Raises:
        FedKSeedError: the file can't be read, or too little is left of it.
    """
    held_out = {recipe.data.held_out, *recipe.evaluation.categories}
    part = _reader(recipe).part(recipe.data.source)
    require_columns([part])
    own = [Owned(e, 0, part, row) for row, e in enumerate(part.examples) if e.category not in held_out]
    own, aside = _set_aside(own, kept_back)
    kept, too_long = _owned(own, recipe, tokenizer, _wording(recipe))
    unseen, too_long_ones = _owned(aside, recipe, tokenizer, _wording(recipe))
    for line in _lines([part], own, [*too_long, *too_long_ones], [], recipe):
        note(line)
    encoded = [e for e, _ in kept]
    if len(encoded) < recipe.clients.min_examples:
        raise FedKSeedError(
            f"the client has {len(encoded)} examples after holding out and leaving out long ones, "
            f"[clients] min_examples says {recipe.clients.min_examples}"
        )
    most = None if recipe.evaluation.examples == "all" else recipe.evaluation.examples
    drawn = [e for e, _ in unseen][:most]
    return encoded, HeldOut(drawn, _options(drawn, part.examples, recipe))


def _set_aside(owned: Sequence[Owned], share: float) -> tuple[list[Owned], list[Owned]]:
    """A client's rows to train on, and about a share of them that it never trains on, in an order that is random.

    A row's place follows from its text and the share alone: rows that are equal stay together, and a row that was not
    trained on never is, whatever rows come or go and whatever a recipe says.
    """

    def place(one: Owned) -> float:
        e = one.example
        text = json.dumps([e.instruction, e.context, e.response, *map(list, e.turns)])
        return int.from_bytes(sha256(text.encode()).digest()[:8]) / (1 << 64)

    places = [place(one) for one in owned] if share else [1.0] * len(owned)
    aside = sorted((at, k) for k, at in enumerate(places) if at < share)
    return [one for one, at in zip(owned, places, strict=True) if at >= share], [owned[k] for _, k in aside]


def own_held_out(recipe: Recipe, tokenizer: Any, note: Note = lambda line: None) -> tuple[HeldOut, dict[str, HeldOut]]:
    """Examples that a server evaluates on, held-out rows of its own file or folder; and its further sets, by name.

    A server without data has none.

    Args:
        note: is given a line on each file.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    if not is_here(recipe.data.source):
        return HeldOut([]), {}
    settings = recipe.evaluation.model_copy(update={"clients": None})  # which are measured where they are
    recipe = recipe.model_copy(update={"evaluation": settings})
    parts = _parts(recipe.data.source, recipe)
    require_columns(parts)
    every = _rows(parts)
    held_out, others = _hold_out(every, recipe)
    categories, _ = _apart(others, recipe)
    for line in _lines(parts, [], [], [], recipe):
        note(line)
    examples = [one.example for one in every]
    return _held_out(held_out, categories, [], examples, recipe, tokenizer, _wording(recipe), note)


def whole_set(recipe: Recipe, tokenizer: Any, note: Note = lambda line: None) -> HeldOut:
    """The rows of a recipe's data as one held-out set: all, or as many as [evaluation] examples says.

    Args:
        note: is given a line on each file.

    Raises:
        FedKSeedError: the data can't be read, or has fewer rows within the token limit.
    """
    parts = _parts(recipe.data.source, recipe)
    every = _rows(parts)
    kept, too_long = _encode(every, recipe.data.max_tokens, recipe, tokenizer, _wording(recipe))
    for line in _lines(parts, [], too_long, [], recipe):
        note(line)
    drawn = _drawn([e for e, _ in kept], recipe.evaluation.examples, recipe.seed, recipe.data.source)
    if not drawn:
        raise FedKSeedError(f"{recipe.data.source} has no example of {recipe.data.max_tokens} tokens or fewer")
    return HeldOut(drawn, _options(drawn, [one.example for one in every], recipe))


def number_of(portion: float, total: int) -> int:
    """The number of rows that a recipe's portion of `total` rows means: itself, or a share of them, rounded."""
    return portion if isinstance(portion, int) else round(portion * total)


def _reader(recipe: Recipe) -> Reader:
    return Reader(recipe.data.columns, recipe.data.layout, recipe.data.strict)


def _parts(source: str, recipe: Recipe) -> list[SourcePart]:
    """A file, or all files of a folder."""
    if _is_folder(source):
        return [part for parts in _reader(recipe).folder(source).values() for part in parts]
    return [_reader(recipe).part(source)]


def _rows(parts: Sequence[SourcePart]) -> list[Owned]:
    """All rows of some files, whose clients do not matter."""
    return [Owned(e, 0, part, row) for part in parts for row, e in enumerate(part.examples)]


def _is_folder(source: str) -> bool:
    """Whether a source is a folder of files; one that `save_to_disk` wrote is read as a file."""
    path = Path(source).expanduser()
    return path.is_dir() and not is_saved(path)


def _wording(recipe: Recipe) -> Wording:
    return Wording(recipe.data.template, recipe.data.separator)


def _worded(recipe: Recipe, parts: Sequence[SourcePart], tokenizer: Any) -> Wording:
    """The wording of a recipe; for conversations the tokenizer's chat template, if the recipe names no template."""
    conversations = any(part.conversations for part in parts) and tokenizer.chat_template
    if conversations and "template" not in recipe.data.model_fields_set:
        return Wording("chat", recipe.data.separator)
    return _wording(recipe)


def _lines(
    parts: Sequence[SourcePart],
    training: Sequence[Owned],
    too_long: Sequence[Owned],
    held_out: Sequence[Owned],
    recipe: Recipe,
) -> list[str]:
    """A line on each file; of many, the last one sums up the rest."""
    long, known = Counter(id(one.part) for one in too_long), {one.example for one in held_out}
    seen = Counter(id(one.part) for one in training if one.example in known)
    lines = [
        part.said(
            f"{long[id(part)]:,} over {recipe.data.max_tokens:,} tokens left out" if long[id(part)] else "",
            f"{seen[id(part)]:,} for training also held out" if seen[id(part)] else "",
        )
        for part in parts
    ]
    if len(lines) <= MOST_LINES:
        return lines
    rest = parts[MOST_LINES - 1 :]
    rows, empty = sum(len(part.examples) for part in rest), sum(part.empty for part in rest)
    left_out = f"; {empty:,} without a response left out" if empty else ""
    return [*lines[: MOST_LINES - 1], f"{len(rest):,} more files: {rows:,} rows{left_out}"]


def _seen(
    held_out: Sequence[Owned],
    training: Sequence[Owned],
    kept_back: Sequence[Encoded],
    clients: Sequence[Sequence[Encoded]],
    recipe: Recipe,
) -> list[str]:
    """A line on held-out rows that are also trained on, if there are any.

    Args:
        kept_back: of the clients' own rows, those that they do not train on; `clients` has the others.

    Raises:
        FedKSeedError: there is one, and [data] strict refuses that.
    """
    known, trained = {one.example for one in held_out}, {e.example for share in clients for e in share}
    again = [one for one in training if one.example in known]
    rows = {one.example for one in again}
    count = sum(one.example in rows for one in held_out) + sum(e.example in trained for e in kept_back)
    if not count:
        return []
    if recipe.data.strict:
        part = again[0].part if again else None
        raise FedKSeedError(
            f"{recipe.data.source if part is None else part.place(again[0].row)}: a training row is the same as a "
            "held-out row, whose loss would be too good; remove one of the two, or set [data] strict = false"
        )
    return [
        f"warning: {count:,} of {len(held_out) + len(kept_back):,} held-out rows are the same as training rows, and "
        "their loss is too good a sign: remove repeated rows ([data] strict = true refuses them)"
    ]


def _apart(owned: Sequence[Owned], recipe: Recipe) -> tuple[dict[str, list[Owned]], list[Owned]]:
    """The rows of each category that is a set of its own, and the others, on which clients may train."""
    found: dict[str, list[Owned]] = {name: [] for name in recipe.evaluation.categories}
    for one in owned:
        if one.example.category in found:
            found[one.example.category].append(one)
    if empty := [name for name, rows in found.items() if not rows]:
        raise FedKSeedError(
            f"[evaluation.sets] held_out is no category of the data beside those of [data] held_out: {empty[0]!r}; "
            f"there are {', '.join(sorted({one.example.category for one in owned})) or 'none'}"
        )
    return found, [one for one in owned if one.example.category not in found]


def _keep_back(
    clients: Sequence[list[Encoded]], names: Sequence[str], recipe: Recipe
) -> tuple[list[list[Encoded]], list[tuple[Encoded, str]]]:
    """The examples on which each client trains, and those that are kept back from them, with their clients' names.

    A client's draw depends on the seed and the client alone.
    """
    (portion,) = [one.clients for one in recipe.evaluation.further if one.clients is not None] or [None]
    if portion is None:
        return list(clients), []
    training, kept_back = [], list[tuple[Encoded, str]]()
    for number, share in enumerate(clients):
        count = max(1, number_of(portion, len(share)))
        if count >= len(share):
            raise FedKSeedError(
                f"[evaluation] clients = {portion} keeps back {count} of the {len(share)} examples of "
                f"{_name(names, number)}, and none is left to train on: keep back fewer, or raise [clients] "
                "min_examples"
            )
        order = generator(recipe.seed, Purpose.KEPT_BACK, number).permutation(len(share))
        kept_back += [(share[i], _name(names, number)) for i in sorted(order[:count])]
        training.append([share[i] for i in sorted(order[count:])])
    return training, kept_back


def _held_out(
    rows: Sequence[Owned],
    categories: Mapping[str, Sequence[Owned]],
    kept_back: Sequence[tuple[Encoded, str]],
    every: Sequence[Example],
    recipe: Recipe,
    tokenizer: Any,
    wording: Wording,
    note: Note,
) -> tuple[HeldOut, dict[str, HeldOut]]:
    """The held-out set that is always there, and the others by name: the validation part first.

    Args:
        rows: the rows of the first.
        kept_back: of the clients' own rows, with their clients' names.
        every: all rows of the data, whose responses are options.
    """
    asked = recipe.evaluation.examples

    def short(owned: Sequence[Owned], name: str) -> list[Encoded]:
        kept, too_long = _owned(owned, recipe, tokenizer, wording, recipe.evaluation.max_tokens)
        if too_long:
            limit = recipe.evaluation.max_tokens or recipe.data.max_tokens
            note(f"{name}: {len(too_long):,} of {len(owned):,} rows over {limit:,} tokens left out")
        return [e for e, _ in kept]

    def held_out(examples: list[Encoded], source: Iterable[Example]) -> HeldOut:
        return HeldOut(examples, _options(examples, source, recipe))

    whole = _drawn(short(rows, HELD_OUT), asked, recipe.seed, "[evaluation]")
    count = number_of(recipe.evaluation.validation or 0, len(whole))
    if recipe.evaluation.validation is not None and not 2 <= count <= len(whole) - 2:
        raise FedKSeedError(
            f"[evaluation] validation = {recipe.evaluation.validation} takes {count} of {len(whole)} held-out "
            "examples: that part and the part that is reported need 2 or more each"
        )
    reported = len(whole) - count
    sets = {VALIDATION: held_out(whole[reported:], every)} if count else {}
    for one in recipe.evaluation.further:
        own = _rows(_parts(one.path, recipe)) if one.path is not None else categories.get(one.held_out or "", ())
        there = kept_back if one.clients is not None else [(e, "") for e in short(own, one.name)]
        most = one.examples or ("all" if asked == "all" else min(asked, len(there)))
        label, who = int.from_bytes(sha256(one.name.encode()).digest()[:8]), f"[evaluation.sets] {one.name!r}"
        drawn = _drawn(there, most, recipe.seed, who, label)
        if len(drawn) < 2:
            raise FedKSeedError(f"{who}: a mean with its error needs 2 examples, {len(drawn)} are there; give it more")
        found = held_out([e for e, _ in drawn], every if one.path is None else [row.example for row in own])
        sets[one.name] = replace(found, owners=[name for _, name in drawn if name])
    return held_out(whole[:reported], every), sets


def _drawn(there: Sequence[Drawn], asked: int | str, seed: int, who: str, *labels: int) -> list[Drawn]:
    """As many examples as are asked for, drawn from those that are there."""
    count = len(there) if asked == "all" else int(asked)
    if count == MOST and 2 <= len(there) < count:  # the default, which small data can't reach
        count = len(there)
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
    if clients.split == "tasks":
        drawn = subsample(
            data.source,
            recipe.seed,
            protocol=data.protocol,
            max_characters=data.max_tokens,
            least=clients.min_examples,
        )
        owned = [Owned(e, owner) for owner, task in enumerate(drawn.clients) for e in task.examples]
        held_out = [Owned(e) for task in drawn.held_out for e in task.examples]
        return Found(held_out, owned, [task.name for task in drawn.clients], len(drawn.too_small))
    if clients.split == "files":
        named = _reader(recipe).folder(data.source)
        owned = [
            Owned(e, owner, part, row)
            for owner, parts in enumerate(named.values())
            for part in parts
            for row, e in enumerate(part.examples)
        ]
        parts = [part for parts in named.values() for part in parts]
        require_columns(parts)
        return Found(*_hold_out(owned, recipe), [*named], parts=parts)
    if _is_folder(data.source):
        raise FedKSeedError(
            f"{data.source} is a folder: set [clients] split = 'files' for one client a file or folder in it, or name "
            "one file"
        )
    part = _reader(recipe).part(data.source)
    require_columns([part])
    names = [""]
    if clients.split == "column":
        if (without := next((k for k, name in enumerate(part.clients) if not name), None)) is not None:
            raise FedKSeedError(
                f"{part.place(without)}: no client is named; [clients] split = 'column' takes it from the column "
                f"{data.columns.get('client', 'client')!r}, or that which [data] columns names, as columns = "
                "{client = 'department'}"
            )
        names = sorted(set(part.clients))
    numbers = {name: number for number, name in enumerate(names)}
    owned = [
        Owned(e, numbers.get(name, 0), part, row)
        for row, (e, name) in enumerate(zip(part.examples, part.clients, strict=True))
    ]
    return Found(*_hold_out(owned, recipe), names, parts=[part])


def _hold_out(
    owned: Sequence[Owned], recipe: Recipe, chosen: str | float | None = None
) -> tuple[list[Owned], list[Owned]]:
    """Held-out and training examples; a whole category is held out, or a random share.

    Args:
        chosen: default the recipe's; where that is the default, and no category of the data, USUAL_SHARE.
    """
    chosen = recipe.data.held_out if chosen is None else chosen
    if isinstance(chosen, str):
        categories = sorted({one.example.category for one in owned})
        if chosen == USUAL and chosen not in categories:
            return _hold_out(owned, recipe, USUAL_SHARE)
        if chosen not in categories:
            raise FedKSeedError(
                f"[data] held_out is no category of the data: {chosen!r}; it has {', '.join(categories) or 'none'}; "
                "a number as 0.1 holds out a random share"
            )
        held = {i for i, one in enumerate(owned) if one.example.category == chosen}
    else:
        order = generator(recipe.seed, Purpose.HOLDOUT).permutation(len(owned))
        held = set(order[: round(chosen * len(owned))].tolist())
    return [owned[i] for i in sorted(held)], [one for i, one in enumerate(owned) if i not in held]


def _owned(
    owned: Sequence[Owned], recipe: Recipe, tokenizer: Any, wording: Wording, most: int | None = None
) -> tuple[list[tuple[Encoded, int]], list[Owned]]:
    """Examples with the numbers of their owners, and those that are too long.

    Args:
        most: [evaluation] max_tokens, for held-out rows; None: [data] max_tokens.

    Raises:
        FedKSeedError: one is too long, and [data] strict refuses that.
    """
    limit, table = most or recipe.data.max_tokens, "data" if most is None else "evaluation"
    kept, too_long = _encode(owned, limit, recipe, tokenizer, wording)
    if recipe.data.strict and too_long and (part := too_long[0].part) is not None:
        raise FedKSeedError(
            f"{part.place(too_long[0].row)}: more than [{table}] max_tokens = {limit} tokens; shorten or remove the "
            "row, raise max_tokens, or set [data] strict = false"
        )
    return kept, too_long


def _encode(
    owned: Sequence[Owned], limit: int, recipe: Recipe, tokenizer: Any, wording: Wording
) -> tuple[list[tuple[Encoded, int]], list[Owned]]:
    """Examples as tokens with the numbers of their owners, and the examples that are left out.

    An example over the limit is left out, but the protocol `official-code` cuts it and leaves it out only where no
    response remains. Texts are packed, those of each owner apart.
    """
    cuts = recipe.data.protocol == "official-code"
    kept, too_long, texts = list[tuple[Encoded, int]](), list[Owned](), dict[int, list[Encoded]]()
    for one, encoded in zip(owned, encode_all([o.example for o in owned], tokenizer, wording), strict=True):
        if one.example.plain:
            texts.setdefault(one.owner, []).append(encoded)
        elif encoded.prompt < limit if cuts else len(encoded.tokens) <= limit:
            kept.append((cut(encoded, limit) if cuts else encoded, one.owner))
        else:
            too_long.append(one)
    kept += [(block, owner) for owner, its in texts.items() for block in packed(its, limit, tokenizer)]
    return kept, too_long


def _divide(
    kept: Sequence[tuple[Encoded, int]], owners: Sequence[str], recipe: Recipe
) -> tuple[list[list[int]], list[str]]:
    """The indices of each client's examples, and the clients' names, if they have any."""
    clients, rng = recipe.clients, generator(recipe.seed, Purpose.PARTITION)
    match clients.split, clients.count:
        case "dirichlet", int(count):
            labels = [e.example.category for e, _ in kept]
            return dirichlet(labels, count, clients.alpha, clients.min_examples, rng), []
        case "even", int(count):
            return even(len(kept), count, clients.min_examples, rng), []
        case _:
            return _by_owner([owner for _, owner in kept], owners, recipe)


def _by_owner(owner_of: Sequence[int], owners: Sequence[str], recipe: Recipe) -> tuple[list[list[int]], list[str]]:
    """The indices of each client's examples, one client an owner, and their names.

    A task with only long examples is no client.
    """
    clients, names = recipe.clients, list(owners)
    parts: list[list[int]] = [[] for _ in owners]
    for i, owner in enumerate(owner_of):
        parts[owner].append(i)
    if clients.split == "tasks":
        names = [name for name, part in zip(owners, parts, strict=True) if part]
        parts = [part for part in parts if part]
    if not parts or clients.count not in (None, len(parts)):
        raise FedKSeedError(
            f"{recipe.data.source} holds the data of {len(parts)} clients"
            + (f", [clients] count says {clients.count}" if clients.count else "; lower [clients] min_examples")
        )
    if clients.split != "tasks" and min(map(len, parts)) < clients.min_examples:
        least = min(range(len(parts)), key=lambda client: len(parts[client]))
        raise FedKSeedError(
            f"client {least} has {len(parts[least])} examples of {names[least]!r} after holding out and leaving out "
            f"long ones, [clients] min_examples says {clients.min_examples}"
        )
    return parts, names
