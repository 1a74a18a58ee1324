"""The beginning of a run in a new directory, and its continuation after a stop: the same tuned model, bit for bit."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from ..recipe.reading import own_recipe
from ..recipe.rules import checked_algorithm
from ..recipe.schema import BEHAVIOUR, Recipe
from .activity import ActivityFile
from .loop import Result, work
from .privacy_plan import kept_secret
from .progress import Progress, Silent
from .ranks import Ranks
from .ray_actors import RayActors
from .simulation import Simulation
from .store import Store
from .workers import threads_of


def start(
    recipe: Recipe | str | Path,
    directory: str | Path,
    progress: Progress | None = None,
    trackers: Collection[str] = (),
    earlier: Iterable[Path] = (),
    engine: Ranks | RayActors | None = None,
) -> Result:
    """Run a recipe in a new directory, which is made only after model and data are loaded.

    Args:
        recipe: a recipe, or the path of its file.
        trackers: names of trackers, beside those of [report] to.
        earlier: directories of runs; the base model is not scored again if one of them has scored it on the same rows.
        engine: see `Simulation`.

    Raises:
        FedKSeedError: the recipe can't be run, or the directory holds a run already.
    """
    recipe, directory = recipe if isinstance(recipe, Recipe) else own_recipe(recipe), Path(directory)
    Store.require_new(directory)  # refuse before a minute of loading
    now = ActivityFile(progress or Silent(), [*recipe.report.to, *trackers])
    simulation = Simulation(recipe.absolute(), now, engine=engine, begins=True)
    created = Store.create(directory, simulation.recipe.to_toml())
    with closing(simulation), created as store, now.shown_in(directory):
        kept_secret(simulation.recipe, directory, simulation.secret)
        federation = simulation.federation
        scores = base_scores(federation.recipe, federation.identity, earlier)
        return work(store, replace(federation, base=scores))


def resume(
    directory: str | Path, progress: Progress | None = None, model: str | None = None, trackers: Collection[str] = (),
    engine: Ranks | RayActors | None = None, at_once: int | None = None,
) -> Result:  # fmt: skip
    """Continue a run that was stopped, from its last committed round.

    Args:
        model: the place of the base model, if it has moved since; the run's recipe then names this place.
        at_once: another number of clients that train side by side, which changes no result; the recipe then has it.
        trackers: names of trackers, beside those of [report] to.
        engine: see `Simulation`.

    Raises:
        FedKSeedError: there is no run, another process works on the run, or model or data have changed.
    """
    directory = Path(directory)
    store = Store(directory)
    recipe = store.load_recipe(model)
    if at_once is not None:  # the threads of a client, by which last bits can differ, stay as they are
        recipe = recipe.having(clients={"at_once": at_once, "threads": threads_of(recipe)})
    now = ActivityFile(progress or Silent(), [*recipe.report.to, *trackers])
    with (
        store.locked(),
        now.shown_in(directory),
        closing(Simulation(recipe, now, secret=kept_secret(recipe, directory), engine=engine)) as simulation,
    ):
        if (model, at_once) != (None, None):
            store.require_same(simulation.identity)
            store.change_recipe(recipe.to_toml())
        return work(store, simulation.federation)


def base_scores(recipe: Recipe, identity: Mapping[str, str], runs: Iterable[Path]) -> dict[str, Any] | None:
    """The base model's evaluation by the first of other runs that has it, as fields of `Evaluation`; None if none has.

    Runs of an experiment differ in their method or its rate, not in what they begin with. Where all of it is equal, an
    evaluation says the same, bit for bit. Adapters that are put into the model are part of it, and those of two
    algorithms differ.

    Args:
        identity: the digests of the run's base model and data, which the other's have to equal.
        runs: directories; one that can't be read has nothing.
    """
    ours, names = _start(recipe), identity.keys() - {"directions"}  # which say nothing of a base model and rows
    for directory in runs:
        try:
            store = Store(directory, looks=True)
            theirs = store.recall("identity") or {}
            begun = store.load_recipe()
            same = _start(begun) == ours and all(theirs.get(name) == identity[name] for name in names)
            stated = {tuple(losses) for losses in (begun.model.losses, recipe.model.losses) if losses is not None}
            if theirs and same and len(stated) < 2 and (scores := store.evaluations().get(0)) is not None:
                return scores
        except FedKSeedError:  # it costs the time of an evaluation, no more
            continue
    return None


def _start(recipe: Recipe) -> list[Any]:
    """The settings of which a recipe's first evaluation is made."""
    adapters = recipe.training.algorithm if checked_algorithm(recipe).adapts else None
    # not what tokenizer and model do, which older runs lack: the tokens of all rows are in the data's digest
    model = recipe.model.model_copy(update=dict.fromkeys(BEHAVIOUR))
    return [adapters, recipe.seed, model, recipe.data, recipe.clients, recipe.evaluation, recipe.peft]
