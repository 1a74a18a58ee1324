"""Flower's ServerApp: goes on with a run from its last committed round, in whatever Flower run it is started."""

import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from ...errors import FedKSeedError
from ...recipe.algorithms import algorithm_of
from ...recipe.reading import load_recipe
from ...run.loop import Result, work
from ...run.progress import Progress, Silent
from ...run.store import Store
from ..die_with_parent import die_with_parent
from ..recipes import recipe_for_clients
from .federation import Server
from .grid import Numbers, Remote
from .journal import Journal

# Where flwr 1.41 pulls replies.
PULLS, PULL, INFLATE = "flwr.superlink.grid.http_grid", "pull_objects", "inflate_object_from_contents"
PARTS = 3  # of a reply: the message, its record of records, and the record with its bytes
PATIENCE = 20.0  # seconds for the parts of a reply of kilobytes, and up to 10 more: no other is read in them
LARGE = 180.0  # of one that holds weights; its sender gets no more for any part

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do what is left of the run whose directory the run configuration names under `run`."""
    # Without its executor, Flower's process would wait for a SuperLink that is gone, and keep others off the run.
    die_with_parent(signal.SIGKILL)
    directory = Path(str(context.run_config["run"]))
    with Journal(directory) as journal:
        algorithm = load_recipe(Store(directory).recipe).training.algorithm
        guard_pulls(PATIENCE if algorithm_of(algorithm).pooled else LARGE)
        journal.result(serve(directory, grid, journal))


def guard_pulls(seconds: float) -> None:
    """Let no client's reply hold up the others' for long, or end this process.

    Where flwr 1.41 pulls replies, it waits for one that is still being sent, two hours if its parts keep coming, and
    raises for all what it can't read of one. Here both become the error that a reply is missing.

    Raises:
        FedKSeedError: this version of Flower has no such place.
    """
    theirs: Any = import_module(PULLS)
    pull: Any = getattr(theirs, PULL, None)
    inflate: Any = getattr(theirs, INFLATE, None)
    if pull is None or inflate is None:
        raise FedKSeedError(f"{PULLS} has no {PULL} or {INFLATE}: this version of Flower was not tested")

    def whole(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        if len(object_ids) > PARTS:
            raise theirs.ObjectPullError(object_ids[-1], f"a reply has {PARTS} parts, this one {len(object_ids)}")
        contents = pull(object_ids, pull_object_fn, max_time=seconds)
        try:
            found = inflate(object_ids[-1], dict(contents))  # the last is made of the others
            if not isinstance(found, Message):
                raise TypeError(f"a message was expected, it is a {type(found).__name__}")
        except Exception as error:  # Protobuf's, Flower's own, an IndexError: a client wrote these bytes
            raise theirs.ObjectPullError(object_ids[-1], f"it can't be read: {error}") from error
        return contents

    setattr(theirs, PULL, whole)


def serve(directory: Path, grid: Grid, progress: Progress | None = None) -> Result:
    """Do what is left of a run with the clients behind a Grid.

    Raises:
        FedKSeedError: there is no run, another process works on it, something of it has changed, or too few clients
            have answered. Every round that was finished is kept.
    """
    store, progress = Store(directory), progress or Silent()
    with store.locked():
        recipe = load_recipe(store.recipe)
        numbers = Numbers(directory, recipe.clients.count)
        minimum = recipe.network.minimum_of(recipe.clients.cohort_of(numbers.count))
        text = recipe_for_clients(recipe, numbers.count)
        remote = Remote(grid, numbers, text, minimum, recipe.network, progress)
        return work(store, Server(recipe, remote, progress))
