"""Held-out sets: the one that is always there, its validation part, and those that [evaluation.sets] asks for."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias, TypeVar

from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from ..recipe.schema import HELD_OUT, VALIDATION, EvaluationTable, HeldOutSetTable, Recipe
from .batches import Encoded
from .encoder import Encoder, context_of
from .layouts import MOST_LABELS, Example, alike_in_form
from .split import OwnedRow, Row, read_files, rows_of
from .wording import answer_tokens

FEWEST = 10  # rows that say whether a model is better: two standard errors of fewer say little
DEFAULT_EXAMPLES = EvaluationTable.model_fields["examples"].default
Drawn = TypeVar("Drawn")
Note: TypeAlias = Callable[[str], None]  # shows a line to whoever watches


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out set: its examples, and the responses that the metric `choice` offers for each category of them."""

    examples: list[Encoded]
    options: dict[str, list[str]] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)  # the client of each example, in the set of the clients' own rows


@dataclass(frozen=True, slots=True)
class HeldOutRows:
    """The rows from which held-out sets are drawn."""

    usual: Sequence[OwnedRow]  # rows for the set that is always there
    categories: Mapping[str, Sequence[OwnedRow]]  # rows of categories that are sets of their own
    every: Sequence[Example]  # all rows of the data: their responses are the options of `choice`
    kept_back: Sequence[tuple[Encoded, str]] = ()  # the clients' own rows, each with its client's name
    trained: Set[Example] = frozenset()  # those on which clients train; a set's file must have none of them


def separate_categories(rows: Sequence[OwnedRow], recipe: Recipe) -> tuple[dict[str, list[OwnedRow]], list[OwnedRow]]:
    """Part the rows of each category that is a set of its own from those on which clients may train."""
    categories: dict[str, list[OwnedRow]] = {name: [] for name in recipe.evaluation.categories}
    training = list[OwnedRow]()
    for row in rows:
        categories.get(row.example.category, training).append(row)
    if empty := [name for name, its_rows in categories.items() if not its_rows]:
        raise FedKSeedError(
            f"[evaluation.sets] held_out is no category of the data beside those of [data] held_out: {empty[0]!r}; "
            f"there are {', '.join(sorted({row.example.category for row in rows})) or 'none'}"
        )
    return categories, training


def keep_back(
    clients: Sequence[list[Row]], names: Sequence[str], recipe: Recipe
) -> tuple[list[list[Row]], list[tuple[Row, str]]]:
    """The examples on which each client trains, and those that are kept back from them, with their clients' names.

    A client's draw depends on the seed and the client alone.
    """
    portion = next((table.clients for table in recipe.evaluation.further if table.clients is not None), None)
    if portion is None:
        return list(clients), []
    training, kept_back = [], list[tuple[Row, str]]()
    for number, share in enumerate(clients):
        name, count = names[number] if names else f"client {number}", max(1, _count_of(portion, len(share)))
        if count >= len(share):
            raise FedKSeedError(
                f"[evaluation] clients = {portion} keeps back {count} of the {len(share)} examples of {name}, and none "
                "is left to train on: keep back fewer, or raise [clients] min_examples"
            )
        order = generator(recipe.seed, Purpose.KEPT_BACK, number).permutation(len(share))
        kept_back += [(share[k], name) for k in sorted(order[:count])]
        training.append([share[k] for k in sorted(order[count:])])
    return training, kept_back


def set_aside(rows: Sequence[OwnedRow], share: float) -> tuple[list[OwnedRow], list[OwnedRow]]:
    """A client's rows to train on, and about a share of them that it never trains on, in an order that is random.

    A row's place follows from its text and the share alone: rows that are equal stay together, and a row that was not
    trained on never is, whatever rows come or go and whatever a recipe says.
    """
    if not share:
        return list(rows), []
    places = list[tuple[float, OwnedRow]]()  # numbers from 0 to 1
    for row in rows:
        example = row.example
        turns = (turn[:2] for turn in example.turns)
        text = json.dumps([example.instruction, example.context, example.response, *turns])
        places.append((int.from_bytes(sha256(text.encode()).digest()[:8]) / (1 << 64), row))
    aside = sorted((pair for pair in places if pair[0] < share), key=lambda pair: pair[0])
    return [row for place, row in places if place >= share], [row for _, row in aside]


def draw_sets(rows: HeldOutRows, encoder: Encoder, note: Note) -> tuple[HeldOut, dict[str, HeldOut]]:
    """The held-out set that is always there, and the others by name with the validation part first."""
    recipe = encoder.recipe
    settings = recipe.evaluation
    candidates = _short_enough(rows.usual, HELD_OUT, encoder, note)
    usual = draw(candidates, settings.examples, recipe.held_out_seed, "[evaluation]")
    chooses = _count_of(settings.validation or 0, len(usual))
    if settings.validation is not None and not 2 <= chooses <= len(usual) - 2:
        raise FedKSeedError(
            f"[evaluation] validation = {settings.validation} takes {chooses} of {len(usual)} held-out examples: that "
            "part and the part that is reported need 2 or more each"
        )
    reported, validation = usual[: len(usual) - chooses], usual[len(usual) - chooses :]
    if len(reported) < FEWEST:
        note(f"{len(reported)} held-out rows can't say if the model becomes better: hold out {FEWEST} or more of them")
    compared = [e.example.response for e in reported[: settings.generated] if settings.written]
    sizes = list(map(len, encoder.tokenizer(compared, add_special_tokens=False).input_ids)) if compared else []
    if long := [size for size in sizes if size > settings.max_new_tokens]:
        note(
            f"warning: [evaluation] max_new_tokens = {settings.max_new_tokens:,} cuts answers short: {len(long):,} of "
            f"the {len(sizes):,} responses that they are compared with are longer, the longest has {max(long):,} tokens"
        )
    sets = {VALIDATION: held_out_of(validation, rows.every, encoder)} if validation else {}
    for table in settings.further:
        sets[table.name] = _draw_further(table, rows, encoder, note)
    return held_out_of(reported, rows.every, encoder), sets


def _draw_further(table: HeldOutSetTable, rows: HeldOutRows, encoder: Encoder, note: Note) -> HeldOut:
    """A set of the clients' own rows, of a file or folder, or of a category."""
    recipe, every = encoder.recipe, rows.every
    if table.clients is not None:
        candidates = list(rows.kept_back)
    else:
        source = rows.categories.get(table.held_out or "", ())
        if table.path is not None:
            source = rows_of(read_files(table.path, recipe))
            every = [row.example for row in source]
        candidates = [(example, "") for example in _short_enough(source, table.name, encoder, note)]
    asked = recipe.evaluation.examples
    count = table.examples or ("all" if asked == "all" else min(asked, len(candidates)))
    label, where = int.from_bytes(sha256(table.name.encode()).digest()[:8]), f"[evaluation.sets] {table.name!r}"
    drawn = draw(candidates, count, recipe.held_out_seed, where, label)
    if len(drawn) < 2:
        raise FedKSeedError(f"{where}: a mean with its error needs 2 examples, {len(drawn)} are there; give it more")
    examples = [example for example, _ in drawn]
    if table.path and (repeated := sum(e.example in rows.trained for e in examples)):
        raise FedKSeedError(
            f"{where}: clients train on {repeated} of its {len(examples)} examples; remove these rows from one of the "
            "two, or take held_out or clients in place of the file"
        )
    return held_out_of(examples, every, encoder, [owner for _, owner in drawn if owner])


def held_out_of(
    examples: list[Encoded], rows: Iterable[Example], encoder: Encoder, owners: Sequence[str] = ()
) -> HeldOut:
    """A set of examples, with the responses in `rows` as options of `choice`.

    Raises:
        FedKSeedError: see `options_of`; or an option, after the prompt of an example, is beyond the model's context.
    """
    options, context = options_of(examples, rows, encoder.recipe), context_of(encoder.recipe, encoder.tokenizer)
    if options and context is not None:
        sizes = {
            (category, around): max(len(answer_tokens(encoder.tokenizer, text, around)) for text in options[category])
            for category, around in {(e.example.category, e.around) for e in examples}
        }
        prompt, size = max(((e.prompt, sizes[e.example.category, e.around]) for e in examples), key=sum)
        if prompt + size > context:
            raise FedKSeedError(
                f"[evaluation] metrics: 'choice' puts each option after the prompt, and an option of {size:,} tokens "
                f"after a prompt of {prompt:,} is beyond the model's context of {context:,}: shorten the "
                f"options, or leave out rows with long prompts by [evaluation] max_tokens = {max(1, context - size)}"
            )
    return HeldOut(examples, options, list(owners))


def _short_enough(rows: Sequence[OwnedRow], name: str, encoder: Encoder, note: Note) -> list[Encoded]:
    """The rows of a set within the limit, with a note on the others.

    Raises:
        FedKSeedError: none is.
    """
    encoded = encoder.checked(rows, held_out=True)
    what = "held-out rows" if name == HELD_OUT else f"rows of the set {name!r}"
    left_out = encoder.note_remarks(encoded, len(rows), what, note)
    if rows and not encoded.examples:
        raise FedKSeedError(f"no row of the set {name!r} is left:{left_out.removeprefix(';')}")
    return encoded.examples


def _count_of(portion: float, total: int) -> int:
    """The number of rows that a recipe's portion of `total` rows means: itself, or a share of them, rounded."""
    return portion if isinstance(portion, int) else round(portion * total)


def draw(candidates: Sequence[Drawn], asked: int | str, seed: int, where: str, *labels: int) -> list[Drawn]:
    """As many examples as are asked for, in random order.

    Raises:
        FedKSeedError: fewer are there; of the default number, all go.
    """
    count = len(candidates) if asked == "all" else int(asked)
    if count == DEFAULT_EXAMPLES and len(candidates) >= 2:
        count = min(count, len(candidates))
    if len(candidates) < count:
        raise FedKSeedError(
            f"{where} asks for {count} held-out examples, {len(candidates)} are there within the token limit; ask for "
            "fewer or raise max_tokens"
        )
    order = generator(seed, Purpose.EVALUATION, *labels).permutation(len(candidates))
    return [candidates[k] for k in order[:count]]


def options_of(evaluated: Sequence[Encoded], rows: Iterable[Example], recipe: Recipe) -> dict[str, list[str]]:
    """The different responses of all rows of each evaluated category, sorted; none without the metric `choice`.

    Raises:
        FedKSeedError: a category has one response, or too many to choose among.
    """
    if "choice" not in recipe.evaluation.measured:
        return {}
    options: dict[str, set[str]] = {e.example.category: set() for e in evaluated}
    for row in rows:
        if row.category in options:
            options[row.category].add(row.response)
    if len(options) > 1 and all(len(responses) == 1 for responses in options.values()):  # the label is the category
        options = dict.fromkeys(options, set[str]().union(*options.values()))
    for category, responses in options.items():
        if alike := alike_in_form(responses):
            raise FedKSeedError(
                f"[evaluation] metrics: 'choice' is made among different responses, and {alike[0]!r} and {alike[1]!r} "
                "differ by case, space or form of Unicode alone; make them one in all files"
            )
        if not 2 <= len(responses) <= MOST_LABELS:
            where = f"the category {category!r} has" if category else "rows without a category have"
            raise FedKSeedError(
                f"[evaluation] metrics: 'choice' is made among the different responses of a category, 2 to "
                f"{MOST_LABELS} of them; {where} {len(responses):,}. Give each classification task a category of its "
                "own ([data] columns names its field) and hold out rows of these, or leave 'choice' out"
            )
    return {category: sorted(responses) for category, responses in options.items()}
