"""The ServerApp for Flower: a run in a directory of its own, continued by the next `flwr run` that names it."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...errors import FedKSeedError
from ...files import exclusive
from ...recipe.rules import Where
from ...round import Report
from ...run.loop import Result
from ...run.progress import Progress, Silent
from ...run.store import Store
from ..https.registered_keys import keys_of_run
from ..protocol.server import serving
from ..protocol.server.client_numbers import ClientNumbers
from .grid_carrier import GridCarrier

FOLDER = "flower"  # in a run's directory

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the remaining rounds of the run that Flower's run configuration names.

    Its values: `recipe`, a file; `run`, the directory of the run; `certs`, the directory of `fedkseed certs`, or "" for
    tasks and answers without signatures. All lie on the machine of the SuperLink.

    Raises:
        FedKSeedError: the recipe can't be followed, or the run can't go on; all finished rounds are kept.
    """
    recipe, run, keys = (str(context.run_config.get(name, "")) for name in ("recipe", "run", "certs"))
    if not recipe or not run:
        raise FedKSeedError('there is no recipe or no run: flwr run … --run-config \'recipe="FILE" run="DIRECTORY"\'')
    result = run_rounds(Path(recipe), Path(run), Path(keys).resolve() if keys else None, grid, FlowerLog())
    print(f"digest of the tuned model: {result.digest}", flush=True)


def run_rounds(recipe: Path, directory: Path, keys: Path | None, grid: Grid, progress: Progress) -> Result:
    """Begin a run, or go on with it from its last finished round.

    Args:
        keys: directory of `fedkseed certs`; None: tasks and answers are not signed.

    Raises:
        FedKSeedError: see `main`.
    """
    wanted = serving.begin(recipe, (), directory, Where.FLOWER_SERVER, note=progress.note)
    with exclusive(directory / FOLDER / "server.lock", f"another ServerApp works on {directory}; stop it first"):
        Store(directory).change_recipe(wanted.to_toml())  # [network] may be another than the last time
        if keys is not None:
            keys_of_run(directory, keys, progress, FOLDER).register()
        elif wanted.clients.count is not None:  # else `serve` asks for it
            ClientNumbers.register(directory, range(wanted.clients.count))
        return serve(directory, grid, progress)


def serve(directory: Path, grid: Grid, progress: Progress) -> Result:
    """Carry out the remaining rounds of a run with the clients behind a Grid, see `serving.serve`."""
    return serving.serve(directory, GridCarrier(grid, progress.note), FOLDER, progress)


class FlowerLog(Silent):
    """The progress of a run as lines in Flower's log, which `flwr run --stream` shows."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def round_done(self, report: Report) -> None:
        print(f"round {report.round + 1}: clients {list(report.clients)}, local loss {report.loss:.4f}", flush=True)
