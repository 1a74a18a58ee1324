"""A recipe's data for each party: for a simulation, a client with its own file, a server, or a measurement.

Each function is given `note`, which shows a line to whoever watches: one on each file, and on what a user may not
expect.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..errors import FedKSeedError
from ..recipe.schema import VALIDATION, Recipe
from .batches import Encoded
from .encoder import EncodedRows, Encoder
from .held_out import (
    DEFAULT_EXAMPLES,
    HeldOut,
    HeldOutRows,
    Note,
    draw,
    draw_sets,
    held_out_of,
    keep_back,
    separate_categories,
    set_aside,
)
from .layouts import Example, normal_form
from .sources import DataFile, is_here, remarks, require_columns
from .split import (
    DEFAULT_CATEGORY,
    SHARE_WITHOUT_IT,
    OwnedRow,
    SourceRows,
    divide,
    hold_out,
    read_files,
    read_source,
    reader_of,
    rows_of,
)

PAIRS_SHOWN = 3  # of files with rows in common; of more, their number
MOST_LINES = 12  # files with a line each; of more, the last line sums up the others


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
    settled: dict[str, Any] = field(default_factory=dict)  # keys of [data] that the recipe left open: see `Encoder.of`
    notes: list[str] = field(default_factory=list)  # the lines on files, and on what a user may not expect
    # Numbers of the examples in each held-out set that are training rows, too; `held_out` has the name "".
    also_trained: dict[str, list[int]] = field(default_factory=dict)

    def digest(self) -> str:
        """A hash over all tokens in their order, by which a run recognises that its data is still the same."""
        return digest([*self.clients, self.held_out, *(held_out.examples for held_out in self.sets.values())])

    def name(self, client: int) -> str:
        """The name of a client, or its number where it has none."""
        return self.names[client] if self.names else f"client {client}"


def digest(parts: Sequence[Sequence[Encoded]]) -> str:
    """A hash over all tokens of some lists of examples, in their order."""
    return sha256(repr([[e.tokens for e in part] for part in parts]).encode()).hexdigest()


def share_out(recipe: Recipe, tokenizer: Any, show: Note = lambda line: None) -> ClientShares:
    """Divide a recipe's data among clients; the same recipe always gives the same division.

    Args:
        show: is given each of the notes.

    Raises:
        FedKSeedError: the data can't be read, or is too little for what the recipe asks.
    """
    notes = list[str]()

    def note(line: str) -> None:
        notes.append(line)
        show(line)

    source = read_source(recipe)
    categories, training = separate_categories(source.training, recipe)
    encoder = Encoder.of(recipe, tokenizer, source.files)
    recipe = encoder.recipe
    encoder.prepare(sorted([*source.training, *source.held_out], key=lambda row: row.index))
    encoded = encoder.checked(training)
    unseen = {normal_form(row.example) for row in source.held_out}
    forms = [normal_form(row.example) for row in training]
    repeated = [row for row, form in zip(training, forms, strict=True) if form in unseen]
    _note_files(source.files, note, encoded, repeated=repeated)
    left_out = encoder.note_remarks(encoded, len(training), "training rows", note)
    _note_few_left(source, training, encoded, note)
    try:
        shares, names = divide(encoded.examples, encoded.owners, source.owners, recipe)
    except FedKSeedError as error:
        raise FedKSeedError(f"{error}{left_out}") from error
    recipe.clients.cohort_of(len(shares))
    clients, kept_back = keep_back(shares, names, recipe)
    trained = {e.example for share in clients for e in share}
    every = [row.example for row in (*source.held_out, *source.training)]
    held_out, sets = draw_sets(HeldOutRows(source.held_out, categories, every, kept_back, trained), encoder, note)
    seen = {form for row, form in zip(training, forms, strict=True) if row.example in trained or row.example.plain}
    also_trained = {
        name: [number for number, e in enumerate(each.examples) if normal_form(e.example) in seen]
        for name, each in {"": held_out, **sets}.items()
    }
    # of texts, the rows: blocks have no row's form
    texts = [normal_form(row.example) in seen for row in source.held_out if row.example.plain]
    total = len(texts) + sum(not e.example.plain for each in (held_out, *sets.values()) for e in each.examples)
    _note_repeated(sum(map(len, also_trained.values())) + sum(texts), total, repeated, recipe, note)
    evaluated = [*held_out.examples, *(sets[VALIDATION].examples if VALIDATION in sets else [])]
    has_category = any(e.example.category == DEFAULT_CATEGORY for e in evaluated)
    if recipe.data.format == "rows" and recipe.data.held_out == DEFAULT_CATEGORY and not has_category:
        note(f"the data has no category {DEFAULT_CATEGORY!r}: a share of {SHARE_WITHOUT_IT:g} of its rows is held out")
    asks = any(file.layout.name != "text" for file in source.files) and encoder.wording.template == "paper"
    if asks and tokenizer.chat_template and "template" not in recipe.data.model_fields_set:
        note("the model has a chat template: instructions get the template 'paper' unless [data] template = 'chat'")
    if recipe.evaluation.examples == DEFAULT_EXAMPLES and 0 < len(evaluated) < DEFAULT_EXAMPLES:
        note(f"all {len(evaluated)} held-out examples are evaluated: {DEFAULT_EXAMPLES} is the default, they are fewer")
    counts = len(encoded.too_long), source.too_small
    parts = held_out.options, sets, names, encoder.settled, notes, also_trained
    return ClientShares(clients, held_out.examples, *counts, *parts)


def own_share(
    recipe: Recipe, tokenizer: Any, note: Note = lambda line: None, kept_back: float = 0.0
) -> tuple[list[Encoded], HeldOut, list[Example]]:
    """A client's training examples; examples that it keeps back, [evaluation] examples at most; the rows of the first.

    With kept_back = 0 the first are those that `split = "files"` gives the client of that file.

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
    encoder.prepare(rows)
    trained, kept = set_aside(rows, kept_back)
    training, unseen = encoder.checked(trained), encoder.checked(kept)
    _note_files([file], note, training, unseen)
    left_out = encoder.note_remarks(training, len(trained), "training rows", note)
    encoder.note_remarks(unseen, len(kept), "rows kept back", note)
    if len(training.examples) < recipe.clients.min_examples:
        raise FedKSeedError(
            f"{file.source}: the client has {len(training.examples)} examples after holding out and leaving out long "
            f"ones, [clients] min_examples says {recipe.clients.min_examples}{left_out}"
        )
    most = None if recipe.evaluation.examples == "all" else recipe.evaluation.examples
    unseen_set = held_out_of(unseen.examples[:most], file.examples, encoder)
    return training.examples, unseen_set, [row.example for row in trained]


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
    recipe = recipe.having(evaluation={"clients": None})
    files = read_files(recipe.data.source, recipe)
    require_columns(files)
    rows = rows_of(files)
    held_out, others = hold_out(rows, recipe)
    categories, _ = separate_categories(others, recipe)
    _note_files(files, note)
    candidates = HeldOutRows(held_out, categories, [row.example for row in rows])
    return draw_sets(candidates, Encoder.of(recipe, tokenizer), note)


def whole_set(recipe: Recipe, tokenizer: Any, note: Note = lambda line: None) -> HeldOut:
    """The rows of a recipe's data as one held-out set: all, or as many as [evaluation] examples says.

    Args:
        note: is given a line on each file.

    Raises:
        FedKSeedError: the data can't be read, or has fewer rows within the token limit.
    """
    files = read_files(recipe.data.source, recipe)
    rows, encoder = rows_of(files), Encoder.of(recipe, tokenizer, files)
    encoded = encoder.within(rows)
    _note_files(files, note, encoded)
    left_out = encoder.note_remarks(encoded, len(rows), "rows", note)
    examples = draw(encoded.examples, recipe.evaluation.examples, recipe.held_out_seed, recipe.data.source)
    if not examples:
        raise FedKSeedError(f"{recipe.data.source} has no example of {encoded.limit} tokens or fewer{left_out}")
    return held_out_of(examples, [row.example for row in rows], encoder)


def _note_files(
    files: Sequence[DataFile], note: Note, *encoded: EncodedRows, repeated: Sequence[OwnedRow] = ()
) -> None:
    """A line on each file: its rows, and how many are left out, repeated, or both trained on and held out."""
    long = Counter(id(row.file) for each in encoded for row in each.too_long)
    twice = Counter(id(row.file) for row in repeated)
    others = files[MOST_LINES - 1 :] if len(files) > MOST_LINES else []
    for file in files[: len(files) - len(others)]:
        limit = f"{long[id(file)]:,} over {encoded[0].limit:,} tokens left out" if long[id(file)] else ""
        note(file.summary(limit, f"{twice[id(file)]:,} for training also held out" if twice[id(file)] else ""))
    if others:
        rows = sum(len(file.examples) for file in others)
        note(f"{len(others):,} more files: {rows:,} rows{remarks(others)}")
    holders = dict[Example, list[str]]()
    for file in files if len(files) > 1 else ():
        for example in dict.fromkeys(file.examples):
            holders.setdefault(example, []).append(file.name)
    if shared := Counter((first, other) for first, *more in holders.values() for other in more):
        pairs = ", ".join(f"{one} and {two} ({count:,})" for (one, two), count in shared.most_common(PAIRS_SHOWN))
        pairs += f" and {len(shared) - PAIRS_SHOWN:,} more" * (len(shared) > PAIRS_SHOWN)
        note(f"warning: files share rows: {pairs}; is one a copy? Remove it, or its rows count twice")


def _note_few_left(source: SourceRows, training: Sequence[OwnedRow], encoded: EncodedRows, note: Note) -> None:
    """A warning on clients that lose more than half of their rows."""
    rows = Counter(row.owner for row in training)
    lost = Counter(row.owner for row in (*encoded.too_long, *encoded.uncounted, *encoded.refused))
    few = [owner for owner in lost if source.owners[owner] and 2 * lost[owner] > rows[owner]]
    if few:
        shown = (f"{source.owners[owner]} {rows[owner] - lost[owner]:,} of {rows[owner]:,}" for owner in few[:5])
        note(f"warning: clients train on less than half of their rows: {', '.join(shown)}" + ", …" * (len(few) > 5))


def _note_repeated(count: int, total: int, rows: Sequence[OwnedRow], recipe: Recipe, note: Note) -> None:
    """A line on the held-out rows that are also trained on, `count` of `total`; [data] strict refuses them.

    Args:
        rows: the training rows that are the same as some held-out row of the data, drawn or not.
    """
    if recipe.data.strict and (count or rows):
        file = rows[0].file if rows else None
        raise FedKSeedError(
            f"{recipe.data.source if file is None else file.place(rows[0].index)}: a training row is the same as a "
            "held-out row, whose loss would be too good; remove one of the two, or set [data] strict = false"
        )
    if count:
        names = list(dict.fromkeys(row.file.name for row in rows if row.file is not None))
        where = f" of {', '.join(names[:PAIRS_SHOWN])}{', …' * (len(names) > PAIRS_SHOWN)}" if names[1:] else ""
        note(
            f"warning: {count:,} of {total:,} held-out rows are the same as training rows{where}, but for capitals, "
            "space and punctuation, and their loss is too good a sign: remove repeated rows ([data] strict = true "
            "refuses them)"
        )
