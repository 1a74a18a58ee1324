"""The digests of model, tokenizer and basis in a recipe, and its losses: parties check theirs, a server needs none."""

from pathlib import Path
from typing import Any

import tomlkit

from ..files import border, write_atomically
from ..models.dtypes import with_dtype
from ..recipe.basis_digest import with_basis
from ..recipe.reading import load_recipe
from ..recipe.rules import Where, checked_algorithm
from ..recipe.schema import BEHAVIOUR
from ..run.prerequisites import require_ready
from ..run.progress import Progress, Silent


def pin(path: Path, progress: Progress | None = None) -> dict[str, dict[str, object]]:
    """Load the model of a recipe's file, and write its digests and losses into [model]; returns what is written.

    In place of the type `auto` the measured one is written. Where the output layer or the last layers are tuned, the
    names of their weights are written, too, as `tuned`; where a basis has the directions, its digest, as `basis_digest`
    of [directions]. Comments and order of the file stay.

    Raises:
        FedKSeedError: the recipe can't be read or written, or its model can't be loaded.
    """
    progress = progress or Silent()
    recipe = with_dtype(as_written := load_recipe(path), progress.note)
    algorithm, model, directions = checked_algorithm(recipe), recipe.model, recipe.directions
    unpinned = {"basis_digest": None} if directions.basis else {}
    facts = ("digest", *BEHAVIOUR)
    anew, basis = with_basis(recipe.having(model=dict.fromkeys(facts), directions=unpinned))
    require_ready(anew, Where.RUN, has_data=False)
    from ..data.tokenizer_digest import with_tokenizer
    from ..run.setup import build, tokenizer_of

    anew = with_tokenizer(anew, tokenizer := tokenizer_of(anew, progress))
    setup = build(anew, tokenizer, basis, serves=False, begins=True, progress=progress)
    loaded = setup.recipe.having(model={"digest": setup.weights.base_digest.hex()})
    written: dict[str, dict[str, object]] = {"model": loaded.model.model_dump(include={*facts}, exclude_none=True)}
    if as_written.model.dtype != model.dtype:
        written["model"]["dtype"] = model.dtype
    if (algorithm.tuned == "output" or (model.last_layers and not algorithm.adapts)) and model.tuned is None:
        written["model"]["tuned"] = list(setup.patterns)
    if basis is not None:
        written["directions"] = {"basis_digest": anew.directions.basis_digest}
    with border(f"can't read the recipe {path}"):
        document = tomlkit.parse(path.read_bytes().decode("utf-8-sig"))
    for name, keys in written.items():
        table: Any = document[name]
        for fact in {*facts} & {*table} - {*keys}:  # a model without finite losses states none
            del table[fact]
        table.update(keys)
    write_atomically(path.resolve(), tomlkit.dumps(document).encode(), 0o666)
    return written
