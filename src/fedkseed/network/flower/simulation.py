"""Many virtual clients on Flower's simulation engine, with the same tuned model, bit for bit, as in one process.

Ray shares the clients out over processes (`[clients] at_once` of them), each with a model of its own.
"""

from collections.abc import Collection
from dataclasses import replace
from os import environ
from pathlib import Path
from tomllib import loads
from typing import Any

import torch

from ...errors import FedKSeedError
from ...recipe.reading import parse
from ...recipe.rules import Where, require_legal
from ...recipe.schema import NetworkTable, Recipe
from ...round import answer
from ...run.activity import ActivityFile
from ...run.loop import Result, work
from ...run.privacy_plan import kept_secret
from ...run.progress import Progress
from ...run.simulation import Simulation
from ...run.store import Store
from ...run.workers import computing_with
from ..protocol.client.task_handler import Bound, OnStep, TaskHandler
from ..protocol.envelope import Task
from .compat import QUIET, require_flower


class Virtual:
    """The clients of a recipe in one of the engine's processes, any of which may be asked there."""

    def __init__(self, recipe: bytes) -> None:
        self.simulation = Simulation(parse(loads(recipe.decode())), serves=False)

    def answer(self, task: Task, on_step: OnStep, bound: Bound) -> tuple[bytes, bytes]:
        simulation, parts = self.simulation, self.simulation.shares.clients
        with computing_with(_threads(simulation.recipe)):
            client = simulation.setup.client(task.client, len(parts), parts[task.client], on_step)
            client = replace(client, member=simulation.members.get(task.client))
            return task.message, answer(simulation.strategy, task.message, client)

    def afterwards(self) -> None: ...


# Of this process: models stay loaded from round to round. Server and clients have one owner, who may read all texts.
_worker = TaskHandler(Virtual, disclose=lambda code, text: text)


def _answer(task: bytes, context: Any) -> bytes:
    return _worker.reply(task).encode()


def run(recipe: Recipe, directory: Path, progress: Progress, trackers: Collection[str] = ()) -> Result:
    """Run a recipe in a new directory; `fedkseed resume` can continue the run without Flower, to the same model.

    Raises:
        FedKSeedError: the recipe can't be run, the directory holds a run already, or Flower's engine is not installed.
    """
    require_legal(recipe, Where.ENGINE, Where.FLOWER_ENGINE)
    require_flower(simulated=True)
    Store.require_new(directory)
    environ.update(QUIET | {"FLWR_HOME": str(directory.resolve() / "flower")})  # before Flower reads them
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from ..protocol.server.client_numbers import ClientNumbers
    from ..protocol.server.clients import RemoteClients
    from .client_app import client_app
    from .grid_carrier import GridCarrier

    now = ActivityFile(progress, [*recipe.report.to, *trackers])
    simulation = Simulation(recipe.absolute(), now)
    recipe = simulation.recipe
    count, app, outcome = len(simulation.shares.clients), ServerApp(), list[Result | BaseException]()
    with Store.create(directory, recipe.to_toml()) as store, now.shown_in(directory):
        kept_secret(recipe, directory, simulation.secret)

        @app.main()
        def main(grid: Grid, context: Any) -> None:
            try:
                ClientNumbers.register(directory, range(count))
                carrier, numbers = GridCarrier(grid, now.note), ClientNumbers(directory, count)
                day = NetworkTable(deadline=86_400.0, attempts=1)  # seconds; not to be missed for want of a network
                remote = RemoteClients(carrier, numbers, recipe.to_toml().encode(), count, day, now)
                simulation.carry = lambda sent: remote.transport(len(store.reports()), sent, len(sent), lambda *_: None)
                remote.gather()
                outcome.append(work(store, simulation.federation))
            except BaseException as error:
                outcome.append(error)
                raise

        threads, at_once = _threads(recipe), recipe.clients.at_once
        resources = {
            "client_resources": {"num_cpus": threads, "num_gpus": 0.0},
            "init_args": {"num_cpus": threads * at_once, "include_dashboard": False, "_node_ip_address": "127.0.0.1"},
        }
        try:
            run_simulation(app, client_app(_answer), num_supernodes=count, backend_config=resources)
        except Exception as error:
            outcome.append(error)
        ended = outcome[0] if outcome else FedKSeedError("Flower's engine ended without a word")
        if isinstance(ended, BaseException):
            raise ended
    return ended


def _threads(recipe: Recipe) -> int:
    return recipe.clients.threads or max(1, torch.get_num_threads() // recipe.clients.at_once)
