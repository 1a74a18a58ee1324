"""The base model's digest, written into a recipe: each party can check its own model, and a server needs none."""

from pathlib import Path
from typing import Any

import tomlkit

from ..files import border, write_atomically
from ..recipe.algorithms import chosen
from ..recipe.reading import load_recipe
from ..run.setup import build, tokenizer_of
from ..run.watchers import Progress, Silent


def pin(path: Path, progress: Progress | None = None) -> dict[str, object]:
    """Load the model of a recipe's file, and write `digest` into the file's table [model].

    Where the algorithm tunes the output layer, the names of that layer's weights are written, too, as `tuned`.
    Comments and order of the file stay.

    Returns:
        The keys written, and their values.

    Raises:
        FedKSeedError: the recipe can't be read or written, or its model can't be loaded.
    """
    recipe, progress = load_recipe(path), progress or Silent()
    algorithm, model = chosen(recipe), recipe.model
    anew = recipe.model_copy(update={"model": model.model_copy(update={"digest": None})})
    setup = build(anew, tokenizer_of(anew, progress), serves=False, progress=progress)
    found: dict[str, object] = {"digest": setup.weights.base_digest.hex()}
    if algorithm.tuned == "output" and model.tuned is None:
        found["tuned"] = list(setup.patterns)
    with border(f"can't read the recipe {path}"):
        document = tomlkit.parse(path.read_bytes().decode())
    table: Any = document["model"]
    table.update(found)
    write_atomically(path.resolve(), tomlkit.dumps(document).encode(), 0o666)
    return found
