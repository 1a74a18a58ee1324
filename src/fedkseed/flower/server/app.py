"""The ServerApp for Flower: continues a run from its last committed round, in any Flower run that starts it."""

import secrets
import signal
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...recipe.algorithms import algorithm_of
from ...run.loop import NEWCOMER, Result, work
from ...run.privacy import kept_secret, with_noise
from ...run.store import NONCES, Store
from ...run.watchers import Progress, Silent
from ...strategy import Strategy
from ...wire.codec import encode
from ..compat import PULL_LARGE, PULL_SMALL, guard_pulls
from ..die_with_parent import die_with_parent
from ..envelope import NO_NONCE
from ..recipes import recipe_for_clients
from ..signatures import ServerSigning
from .clients import Numbers, Remote
from .rounds import federation
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
    """Carry out the remaining rounds of a run with the clients behind a Grid.

    Raises:
        FedKSeedError: there is no run, another process works on the run, its model or data have changed, or too few
            clients have answered. All finished rounds are kept.
    """
    store, progress = Store(directory), progress or Silent()
    with store.locked():
        recipe = store.load_recipe()
        numbers = Numbers(directory, recipe.clients.count)
        recipe = with_noise(recipe, numbers.count)
        minimum = recipe.network.minimum_of(recipe.clients.cohort_of(numbers.count))
        text = recipe_for_clients(recipe, numbers.count)
        remote = Remote(grid, numbers, text, minimum, recipe.network, progress)
        remote.signing = ServerSigning.read(directory / "flower", current_nonce(store))
        parts = federation(recipe, remote, progress, remote.signing, kept_secret(recipe, directory))
        remote.history = None if remote.signing is None else store.history
        result = work(store, parts)
        if algorithm_of(recipe.training.algorithm).pooled:  # kilobytes
            hand_out(store, parts.strategy, remote)
        return result


def hand_out(store: Store, strategy: Strategy[Any], remote: Remote) -> None:
    """Send the tuned model of a finished run to the clients that are connected."""
    state = store.state(strategy.state, store.tuned)
    message = encode(strategy.broadcast(state, [NEWCOMER])[NEWCOMER])
    kept = remote.hand_out(store.rounds, message)
    remote.progress.note(f"{len(kept)} of {remote.numbers.count} clients have kept the tuned model")


def current_nonce(store: Store) -> bytes:
    """The random bytes that tell this run's tasks and answers from those of any other run, and of any other history.

    They are drawn when there are none since the beginning, or since the last rollback.
    """
    known = store.recall(NONCES) or [[0, None]]
    if known[-1][1] is None:
        known[-1][1] = secrets.token_bytes(len(NO_NONCE)).hex()
        store.remember(NONCES, known)
    return bytes.fromhex(known[-1][1])
