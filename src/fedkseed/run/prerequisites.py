"""Prerequisites of a run, checked before PyTorch is loaded: legal settings, packages, a model, rows for each client.

Files are read again once the work begins, which takes little beside making tokens of their rows. What is known by then
alone: rows that are too long for the model, what a chat template refuses, and whether the model has the right weights.
"""

from collections.abc import Collection
from pathlib import Path

from ..data.held_out import keep_back, separate_categories
from ..data.sources import remarks
from ..data.split import divide, read_files, read_source
from ..errors import FedKSeedError
from ..models.place import require_device, require_there
from ..recipe import own_code
from ..recipe.algorithms import algorithm_of
from ..recipe.basis_digest import with_basis
from ..recipe.rules import Where, require_legal, require_packages
from ..recipe.schema import Recipe
from .progress import Silent
from .trackers import Trackers


def require_ready(recipe: Recipe, *places: Where, trackers: Collection[str] = (), has_data: bool = True) -> None:
    """Refuse a recipe that can't be followed on this machine, as far as that can be known without loading its model.

    Args:
        places: further places whose rules hold.
        trackers: beside those of [report] to.
        has_data: whether its rows are needed.

    Raises:
        FedKSeedError: a rule is broken, a package or a file missing, no model there, or rows are faulty or too few.
    """
    algorithm = algorithm_of(recipe.training.algorithm)
    require_legal(recipe, Where.ALWAYS, Where.ALGORITHM, *places, algorithm=algorithm)
    require_packages(recipe, algorithm)
    Trackers([*recipe.report.to, *trackers], Silent().note)
    own_code.require_file(recipe.training.objective, "[training] objective")
    for metric in recipe.evaluation.written:
        own_code.require_file(metric, "[evaluation] metrics")
    require_there(recipe.model.name)
    require_device(recipe.model.device)
    with_basis(recipe)
    if has_data:
        _require_rows(recipe)


def _require_rows(recipe: Recipe) -> None:
    """Read the data and share it out, as the work does it with those rows that are not too long."""
    if recipe.clients.split == "tasks" and Path(recipe.data.source).expanduser().exists():
        return  # gigabytes
    source = read_source(recipe)
    _, training = separate_categories(source.training, recipe)
    try:
        shares, names = divide(training, [row.owner for row in training], source.owners, recipe)
        recipe.clients.cohort_of(len(shares))
        keep_back(shares, names, recipe)
    except FedKSeedError as error:
        raise FedKSeedError(f"{error}{remarks(source.files)}") from error
    for table in recipe.evaluation.further:
        if table.path is not None:
            read_files(table.path, recipe)
