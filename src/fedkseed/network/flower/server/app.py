"""The ServerApp for Flower: continues a run from its last committed round, in any Flower run that starts it."""

import signal
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ....recipe.algorithms import algorithm_of
from ....run.loop import Result
from ....run.progress import Progress, Silent
from ....run.store import Store
from ...protocol.server import serving
from ..compat import PULL_LARGE, PULL_SMALL, guard_pulls
from ..die_with_parent import die_with_parent
from .carrier import GridCarrier
from .status_file import Journal

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the remaining rounds of the run whose directory is the value `run` of Flower's run configuration."""
    # Else this process would outlive its executor, wait for a SuperLink that is gone, and hold the run's lock.
    die_with_parent(signal.SIGKILL)
    directory = Path(str(context.run_config["run"]))
    with Journal(directory) as journal:
        algorithm = Store(directory).load_recipe().training.algorithm
        guard_pulls(PULL_SMALL if algorithm_of(algorithm).pooled else PULL_LARGE)
        journal.result(serve(directory, grid, journal))


def serve(directory: Path, grid: Grid, progress: Progress | None = None) -> Result:
    """Carry out the remaining rounds of a run with the clients behind a Grid, see `serving.serve`."""
    return serving.serve(directory, GridCarrier(grid), "flower", progress or Silent())
