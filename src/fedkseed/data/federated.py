"""A recipe's data for each party: for a simulation, a client with its own file, a server, or a measurement."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeAlias

from ..errors import FedKSeedError
from ..recipe.schema import VALIDATION, Recipe
from . import notes
from .batches import Encoded
from .encoder import Encoder
from .held_out import (
    HeldOut,
    HeldOutRows,
    client_name,
    draw,
    draw_sets,
    keep_back,
    options_of,
    require_unseen,
    separate_categories,
    set_aside,
)
from .sources import is_here, require_columns
from .split import divide, hold_out, read_files, read_source, reader_of, rows_of

Note: TypeAlias = Callable[[str], None]  # shows a line to whoever watches


@dataclass(frozen=True, slots=True)
class ClientShares:
    """A recipe's data after division: one list of examples a client, and the held-out examples."""

    clients: list[list[Encoded]]
    held_out: list[Encoded]
    too_long: int  # left out of the training examples
    too_small: int = 0  # training tasks with too few examples to be a client
    options: dict[str, list[str]] = field(default_factory=dict)  # the choices in `held_out`, see `HeldOut`
    sets: dict[str, HeldOut] = field(default_factory=dict)  # the validation part, and further held-out sets, by name
    names: list[str] = field(default_factory=list)  # the clients', where files, tasks or a column name them
    template: str | None = None  # the examples', where it is not the recipe's: see `Encoder.of`

    def digest(self) -> str:
        """A hash over all tokens in their order, by which a run recognises that its data is still the same."""
        return digest([*self.clients, self.held_out, *(held_out.examples for held_out in self.sets.values())])

    def name(self, client: int) -> str:
        """The name of a client, or its number where it has none."""
        return client_name(self.names, client)


def digest(parts: Sequence[Sequence[Encoded]]) -> str:
    """A hash over all tokens of some lists of examples, in their order."""
    return sha256(repr([[e.tokens for e in part] for part in parts]).encode()).hexdigest()


def share_out(recipe: Recipe, tokenizer: Any, note: Note = lambda line: None) -> ClientShares:
    """Divide a recipe's data among clients; the same recipe always gives the same division.

    Args:
        note: is given a line on each file, and on what a user may not expect.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    source = read_source(recipe)
    categories, training = separate_categories(source.training, recipe)
    encoder = Encoder.of(recipe, tokenizer, source.files)
    encoded = encoder.training(training)
    _show(notes.on_files(source.files, recipe, encoded.too_long, training, source.held_out), note)
    shares, names = divide(encoded.examples, encoded.owners, source.owners, recipe)
    recipe.clients.cohort_of(len(shares))
    clients, kept_back = keep_back(shares, names, recipe)
    own_rows = [example for example, _ in kept_back]
    _show(notes.on_repeated_rows(source.held_out, training, own_rows, clients, recipe), note)
    every = [row.example for row in (*source.held_out, *source.training)]
    held_out, sets, lines = draw_sets(HeldOutRows(source.held_out, categories, every, kept_back), encoder)
    _show(lines, note)
    require_unseen(sets, clients, recipe)
    validation = sets[VALIDATION].examples if VALIDATION in sets else []
    _show(notes.on_defaults(recipe, [*held_out.examples, *validation]), note)
    template = encoder.wording.template
    return ClientShares(
        clients=clients,
        held_out=held_out.examples,
        too_long=len(encoded.too_long),
        too_small=source.too_small,
        options=held_out.options,
        sets=sets,
        names=names,
        template=template if template != recipe.data.template else None,
    )


def _show(lines: Iterable[str], note: Note) -> None:
    for line in lines:
        note(line)


def own_share(
    recipe: Recipe, tokenizer: Any, note: Note = lambda line: None, kept_back: float = 0.0
) -> tuple[list[Encoded], HeldOut]:
    """Training examples of a client with its own file, and some of those that it never trains on.

    Without the second, of which there are [evaluation] examples at most, the first are those that `split = "files"`
    gives the client of that file.

    Args:
        note: is given a line on the file.
        kept_back: share of the rows that is not trained on, see `set_aside`.

    Raises:
        FedKSeedError: the file can't be read, or too little is left of it.
    """
    held_out = {recipe.data.held_out, *recipe.evaluation.categories}
    file, encoder = reader_of(recipe).file(recipe.data.source), Encoder.of(recipe, tokenizer)
    require_columns([file])
    rows = [row for row in rows_of([file]) if row.example.category not in held_out]
    training, unseen = map(encoder.training, set_aside(rows, kept_back))
    _show(notes.on_files([file], recipe, [*training.too_long, *unseen.too_long]), note)
    if len(training.examples) < recipe.clients.min_examples:
        raise FedKSeedError(
            f"the client has {len(training.examples)} examples after holding out and leaving out long ones, "
            f"[clients] min_examples says {recipe.clients.min_examples}"
        )
    most = None if recipe.evaluation.examples == "all" else recipe.evaluation.examples
    evaluated = unseen.examples[:most]
    return training.examples, HeldOut(evaluated, options_of(evaluated, file.examples, recipe))


def own_held_out(recipe: Recipe, tokenizer: Any, note: Note = lambda line: None) -> tuple[HeldOut, dict[str, HeldOut]]:
    """Examples that a server evaluates on, held-out rows of its own file or folder; and its further sets, by name.

    A server without data has none. The clients' own rows are measured where they are.

    Args:
        note: is given a line on each file.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    if not is_here(recipe.data.source):
        return HeldOut([]), {}
    settings = recipe.evaluation.model_copy(update={"clients": None})
    recipe = recipe.model_copy(update={"evaluation": settings})
    files = read_files(recipe.data.source, recipe)
    require_columns(files)
    rows = rows_of(files)
    held_out, others = hold_out(rows, recipe)
    categories, _ = separate_categories(others, recipe)
    _show(notes.on_files(files, recipe), note)
    candidates = HeldOutRows(held_out, categories, [row.example for row in rows])
    usual, sets, lines = draw_sets(candidates, Encoder.of(recipe, tokenizer))
    _show(lines, note)
    return usual, sets


def whole_set(recipe: Recipe, tokenizer: Any, note: Note = lambda line: None) -> HeldOut:
    """The rows of a recipe's data as one held-out set: all, or as many as [evaluation] examples says.

    Args:
        note: is given a line on each file.

    Raises:
        FedKSeedError: the data can't be read, or has fewer rows within the token limit.
    """
    files, limit = read_files(recipe.data.source, recipe), recipe.data.max_tokens
    rows = rows_of(files)
    encoded = Encoder.of(recipe, tokenizer).within(rows, limit)
    _show(notes.on_files(files, recipe, encoded.too_long), note)
    examples = draw(encoded.examples, recipe.evaluation.examples, recipe.seed, recipe.data.source)
    if not examples:
        raise FedKSeedError(f"{recipe.data.source} has no example of {limit} tokens or fewer")
    return HeldOut(examples, options_of(examples, [row.example for row in rows], recipe))
