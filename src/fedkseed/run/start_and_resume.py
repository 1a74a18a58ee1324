"""The beginning of a run in a new directory, and its continuation after a stop: the same tuned model, bit for bit."""

from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ..recipe.reading import own_recipe
from ..recipe.schema import Recipe
from .activity import ActivityFile
from .known_scores import base_scores
from .loop import Result, work
from .privacy_plan import kept_secret
from .progress import Progress, Silent
from .simulation import Simulation
from .store import Store
from .trackers import Trackers


def start(
    recipe: Recipe | str | Path,
    directory: str | Path,
    progress: Progress | None = None,
    trackers: Collection[str] = (),
    earlier: Iterable[Path] = (),
) -> Result:
    """Run a recipe in a new directory, which is made only after model and data are loaded.

    Args:
        recipe: a recipe, or the path of its file.
        trackers: names of trackers, beside those of [report] to.
        earlier: directories of runs; the base model is not scored again if one of them has scored it on the same rows.

    Raises:
        FedKSeedError: the recipe can't be run, or the directory holds a run already.
    """
    recipe, directory = recipe if isinstance(recipe, Recipe) else own_recipe(recipe), Path(directory)
    Store.require_new(directory)  # refuse before a minute of loading
    copies = Trackers([*recipe.report.to, *trackers], progress or Silent())
    now = ActivityFile(copies)
    simulation = Simulation(recipe.absolute(), now)
    created = Store.create(directory, simulation.recipe.to_toml())
    with closing(simulation), created as store, copies.copying(directory), now.shown_in(directory):
        kept_secret(simulation.recipe, directory, simulation.secret)
        federation = simulation.federation
        scores = base_scores(federation.recipe, federation.identity, earlier)
        return work(store, replace(federation, base=scores))


def resume(
    directory: str | Path, progress: Progress | None = None, model: str | None = None, trackers: Collection[str] = ()
) -> Result:
    """Continue a run that was stopped, from its last committed round.

    Args:
        model: the place of the base model, if it has moved since; the run's recipe then names this place.
        trackers: names of trackers, beside those of [report] to.

    Raises:
        FedKSeedError: there is no run, another process works on the run, or model or data have changed.
    """
    directory = Path(directory)
    store = Store(directory)
    recipe = with_model(store.load_recipe(), model)
    copies = Trackers([*recipe.report.to, *trackers], progress or Silent())
    now = ActivityFile(copies)
    with (
        store.locked(),
        copies.copying(directory),
        now.shown_in(directory),
        closing(Simulation(recipe, now, secret=kept_secret(recipe, directory))) as simulation,
    ):
        if model is not None:
            store.require_same(simulation.identity)
            store.change_recipe(recipe.to_toml())
        return work(store, simulation.federation)


def with_model(recipe: Recipe, model: str | None) -> Recipe:
    """The recipe with another place of its base model; None: the recipe itself."""
    if model is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": model})}).absolute()
