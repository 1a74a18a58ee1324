"""Bases of an experiment's informed directions, made of public text where no file is given.

An experiment's table `bases` has a row for each place of a basis in its recipes, `$basis` or `$basis/NAME`: whether it
is scaled, how many examples it is made of, and its data where that ships with the package.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from ..files import border
from ..recipe.schema import Recipe
from ..report.bars import Bars
from ..weights.basis_file import load_basis, save_basis
from .experiments import Experiment, filled, merge
from .results import RunOutcome

BASIS_PLACE = "basis"
EXAMPLES = 64  # that a basis is made of, where the experiment says no other number


def tiny_place(output: Path) -> Path:
    """The folder of the model of the scale `tiny`."""
    return output / "models" / "tiny"


def all_places(experiment: Experiment, output: Path, given: Mapping[str, str], public: str | None) -> Mapping[str, str]:
    """The paths given, and those of what is made where it is missing: the tiny model, and `$basis`, a folder or a file.

    `$basis` is there where the experiment's bases can be made.
    """
    if experiment.scale == "tiny":
        given = {"model": str(tiny_place(output)), **given}
    if public is not None and BASIS_PLACE in given:
        raise FedKSeedError("give --basis, a basis that is there, or --public, the text to make one of, not both")
    if public is not None and not experiment.bases:
        raise FedKSeedError(f"{experiment.name} makes no basis of public text; leave --public out")
    data_ships = experiment.bases and all("data" in options for options in experiment.bases.values())
    if BASIS_PLACE in given or not (public or data_ships):
        return given
    folder = output / "bases" / experiment.scale / experiment.name
    single = f"${BASIS_PLACE}" in experiment.bases
    return {**given, BASIS_PLACE: str(folder / "basis.safetensors" if single else folder)}


def make_bases(experiment: Experiment, given: Mapping[str, str], public: str | None) -> None:
    """Make the bases whose files are not there, each for the recipe of the first run along it, in float32.

    Args:
        public: public instruction data, for bases without data of their own; see `planning.make_basis.basis_of`.

    Raises:
        FedKSeedError: the data or the model can't be read, or the file can't be written.
    """
    from ..planning.make_basis import basis_of  # which loads PyTorch

    runs = experiment.plan([experiment.first_seed])
    for place, options in experiment.bases.items():
        along = [run.table for run in runs if run.table.get("directions", {}).get("basis") == place]
        if not along or (path := Path(filled(place, given))).exists():
            continue
        recipe = replace(runs[0], table=merge(along[0], {"model": {"dtype": "float32"}})).recipe(given)
        with border(f"can't make {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        with Bars(0) as bars:
            examples = options.get("examples", EXAMPLES)
            basis = basis_of(recipe, options.get("data", public), examples, None, bars, options["scaled"])
            save_basis(basis, path)
            bars.note(f"made {path} of {basis.about['examples']} examples, digest {basis.digest().hex()[:8]}…")


def require_basis_of_record(recipe: Recipe, recorded: RunOutcome) -> None:
    """Refuse a record of a run along another basis than the file that its recipe has now.

    A basis is made of gradients, whose last bits differ between kinds of processors: made anew elsewhere it has another
    digest, and runs along it are other runs.
    """
    path, directions = recipe.directions.basis, (recorded.digests or {}).get("directions", "")
    if path is None or not directions or not Path(path).is_file():
        return
    if (digest := load_basis(Path(path)).digest().hex()) not in directions:
        raise FedKSeedError(
            f"the record of {recorded.directory.name} is of {directions}, and the basis {path} has the digest {digest}"
            ": give the file that was used then by --basis, or leave out --records"
        )


def describe_bases(recipes: Sequence[Recipe]) -> Iterator[Mapping[str, Any]]:
    """The bases that the recipes name and that are there: file name, digest, bytes, and what each was made of."""
    for path in dict.fromkeys(Path(r.directions.basis) for r in recipes if r.directions.basis is not None):
        if path.is_file():
            basis = load_basis(path)
            yield {"file": path.name, "digest": basis.digest().hex(), "bytes": path.stat().st_size, **basis.about}
