"""Notes to the user on a recipe's data: a line for each file, rows that are left out or repeated, other defaults."""

from collections import Counter
from collections.abc import Sequence

from ..errors import FedKSeedError
from ..recipe.schema import Recipe
from .batches import Encoded
from .held_out import DEFAULT_EXAMPLES
from .sources import DataFile
from .split import DEFAULT_CATEGORY, SHARE_WITHOUT_IT, OwnedRow

MOST_LINES = 12  # files with a line each; of more, the last line sums up the others


def on_files(
    files: Sequence[DataFile],
    recipe: Recipe,
    too_long: Sequence[OwnedRow] = (),
    training: Sequence[OwnedRow] = (),
    held_out: Sequence[OwnedRow] = (),
) -> list[str]:
    """A line on each file: its rows, and how many are left out, repeated, or both trained on and held out."""
    evaluated = {row.example for row in held_out}
    long = Counter(id(row.file) for row in too_long)
    repeated = Counter(id(row.file) for row in training if row.example in evaluated)
    lines = [
        file.summary(
            f"{long[id(file)]:,} over {recipe.data.max_tokens:,} tokens left out" if long[id(file)] else "",
            f"{repeated[id(file)]:,} for training also held out" if repeated[id(file)] else "",
        )
        for file in files
    ]
    if len(lines) <= MOST_LINES:
        return lines
    others = files[MOST_LINES - 1 :]
    rows, empty = sum(len(file.examples) for file in others), sum(file.empty for file in others)
    left_out = f"; {empty:,} without a response left out" if empty else ""
    return [*lines[: MOST_LINES - 1], f"{len(others):,} more files: {rows:,} rows{left_out}"]


def on_repeated_rows(
    held_out: Sequence[OwnedRow],
    training: Sequence[OwnedRow],
    kept_back: Sequence[Encoded],
    clients: Sequence[Sequence[Encoded]],
    recipe: Recipe,
) -> list[str]:
    """A line on held-out rows that are also trained on, if there are any.

    Args:
        kept_back: the clients' own rows that they do not train on; `clients` has the others.

    Raises:
        FedKSeedError: there is one, and [data] strict refuses that.
    """
    evaluated, trained = {row.example for row in held_out}, {e.example for share in clients for e in share}
    repeated = [row for row in training if row.example in evaluated]
    examples = {row.example for row in repeated}
    count = sum(row.example in examples for row in held_out) + sum(e.example in trained for e in kept_back)
    if not count:
        return []
    if recipe.data.strict:
        file = repeated[0].file if repeated else None
        raise FedKSeedError(
            f"{recipe.data.source if file is None else file.place(repeated[0].index)}: a training row is the same as a "
            "held-out row, whose loss would be too good; remove one of the two, or set [data] strict = false"
        )
    return [
        f"warning: {count:,} of {len(held_out) + len(kept_back):,} held-out rows are the same as training rows, and "
        "their loss is too good a sign: remove repeated rows ([data] strict = true refuses them)"
    ]


def on_defaults(recipe: Recipe, evaluated: Sequence[Encoded]) -> list[str]:
    """A line on each default that the data does not allow, and on what is done instead."""
    lines, count = [], len(evaluated)
    has_category = any(e.example.category == DEFAULT_CATEGORY for e in evaluated)
    if recipe.data.format == "rows" and recipe.data.held_out == DEFAULT_CATEGORY and not has_category:
        lines.append(
            f"the data has no category {DEFAULT_CATEGORY!r}: a share of {SHARE_WITHOUT_IT:g} of its rows is held out"
        )
    if recipe.evaluation.examples == DEFAULT_EXAMPLES and 0 < count < DEFAULT_EXAMPLES:
        lines.append(
            f"all {count} held-out examples are evaluated: {DEFAULT_EXAMPLES} is the default, and they are fewer"
        )
    return lines
