"""Copies of a run's numbers for trackers of experiments: TensorBoard, MLflow, Trackio, Weights & Biases.

The copies are made of what is in the store, so a tracker has each round once, even if the run was killed and resumed:
the fact TRACKED says what each tracker is known to have and up to which head of the chain. After a rollback the head is
another, and the copy begins anew, under another id. (The callbacks of transformers load PyTorch, send a model's
configuration along with the numbers, and know no rollback.)

By default all of it stays on this machine. What a tracker's own environment variables say comes first: WANDB_MODE,
MLFLOW_TRACKING_URI, TRACKIO_DIR. A tracker that fails is left out for the rest of the process, and the run goes on.
"""

import io
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FedKSeedError, first_line
from ..evaluation.statistics import Evaluation, title_of
from ..recipe.algorithms import ALGORITHMS
from ..recipe.schema import Recipe
from ..strategies.kseed import State, importance
from .round_metrics import SUMS, values
from .store import Store

CURVES = {"loss": "loss/held-out", "rouge": "Rouge-L"}  # other metrics: held-out/TITLE
TRACKED = "tracked"  # the fact with the id, the number of rounds and the head of each tracker's copy
NO_TELEMETRY = {  # settings by which packages would send word of their use
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


class RoundValues(NamedTuple):
    """The numbers of a run after some rounds."""

    done: int  # rounds
    seconds: float  # of training by then
    values: dict[str, float]  # by the name of a curve


class Tracker(ABC):
    """One copy of a run's numbers: made or, by its id, continued."""

    module: str  # that it needs
    install: str  # the line that installs it
    id: str
    _run: Any  # of a package whose runs have a method `log`

    @abstractmethod
    def __init__(self, store: Store, continued: str | None) -> None: ...

    def write(self, rounds: Sequence[RoundValues]) -> None:
        """Add the numbers of rounds, in their order."""
        for done, _, points in rounds:
            self._run.log(points, step=done)

    @abstractmethod
    def close(self, ended: bool) -> None: ...


class Trackers:
    """The trackers that get the numbers of each round.

    A round is handed on when the next is done, or when the run ends: then its evaluation has come, too.

    Args:
        names: keys of TRACKERS.
        note: called with what a watcher is to show.

    Raises:
        FedKSeedError: a package is missing.
    """

    def __init__(self, names: Collection[str], note: Callable[[str], object]) -> None:
        self.names, self.note = list(dict.fromkeys(names)), note
        for name in self.names:
            for variable, silent in NO_TELEMETRY.items():  # before the import, which reads them
                os.environ.setdefault(variable, silent)
            try:
                import_module(TRACKERS[name].module)
            except ImportError as error:
                raise FedKSeedError(
                    f"{name} needs a package that is missing ({error}); install it with: {TRACKERS[name].install}"
                ) from error
        self._open: dict[str, Tracker] = {}
        self._store: Store | None = None

    @contextmanager
    def copying(self, directory: Path) -> Iterator[None]:
        """Copy from the store of a run, whose lock the caller holds, until the end of the `with` block."""
        ended, self._store = False, Store(directory) if self.names else None
        try:
            yield
            self.hand_on(whole=True)
            ended = True
        finally:
            for name, tracker in self._open.items():
                with self._without_failing(name):
                    tracker.close(ended)
            self._open, self._store = {}, None

    def hand_on(self, whole: bool = False) -> None:
        """Give each tracker the rounds that it lacks; `whole`: also the last one."""
        if (store := self._store) is None or not self.names or store.rounds < 0:
            return
        copies, rounds = store.recall(TRACKED) or {}, curves(store)
        last = store.rounds - (not whole)
        for name in list(self.names):
            copy = copies.get(name)
            if copy is None or not -1 < copy["done"] <= store.rounds or store.head(copy["done"]).hex() != copy["head"]:
                copy = {"id": None, "done": -1}  # none, or one of rounds that are no longer those of the run
            with self._without_failing(name):
                if name not in self._open:
                    self._open[name] = TRACKERS[name](store, copy["id"])
                tracker = self._open[name]
                copied = copy["done"] if tracker.id == copy["id"] else -1
                if lacking := [values for values in rounds if copied < values.done <= last]:
                    tracker.write(lacking)
                copies[name] = {"id": tracker.id, "done": last, "head": store.head(last).hex()}
        store.remember(TRACKED, copies)

    @contextmanager
    def _without_failing(self, name: str) -> Iterator[None]:
        """Leave a tracker out from now on if its package fails, whatever the error: the run is worth more."""
        try:
            yield
        except Exception as error:
            why = first_line(error)[:200]
            self.note(f"{name} gets no more numbers ({why}); `fedkseed resume` hands on what it lacks")
            self.names = [other for other in self.names if other != name]


def curves(store: Store) -> list[RoundValues]:
    """The points of all curves of a run, in the order of the rounds; those of 0 rounds are the base model's."""
    reports = store.reports()
    means = {done: Evaluation.of(scores).means for done, scores in store.evaluations().items()}
    sums, rounds = {metric.name: 0.0 for metric in SUMS}, list[RoundValues]()
    for done, seconds in enumerate(accumulate((report.get("seconds", 0.0) for report in reports), initial=0.0)):
        scores = means.get(done, {}).items()
        points = {CURVES.get(name, f"held-out/{title_of(name)}"): mean for name, mean in scores}
        if done:
            report = reports[done - 1]
            sums = {metric.name: sums[metric.name] + (metric.value(report) or 0) for metric in SUMS}
            points = values(report) | sums | points
        rounds.append(RoundValues(done, seconds, points))
    return rounds


def settings(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe that a reader compares runs by; of paths, the last part."""
    table, numbers_and_names = recipe.model_dump(exclude_none=True, mode="json"), dict[str, Any](seed=recipe.seed)
    for part in ("model", "data", "clients", "directions", "training"):
        for key, value in table[part].items():
            if isinstance(value, str | int | float):
                name = Path(value).name if isinstance(value, str) and "/" in value else value
                numbers_and_names[f"{part}.{key}"] = name
    return numbers_and_names


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run's directory; each process replaces those of the one before."""

    module, install = "tensorboard", "pip install 'fedkseed[plots]'"

    def __init__(self, store: Store, continued: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.id, folder = secrets.token_hex(4), store.directory.resolve() / "tensorboard"  # never that of before
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder), purge_step=0)  # lets a running TensorBoard drop old data
        algorithm = store.load_recipe().training.algorithm
        self._began, self._store = store.recipe.stat().st_mtime, store  # seconds since 1970
        self._draws = algorithm in ALGORITHMS and ALGORITHMS[algorithm].pooled  # directions, by their importance

    def write(self, rounds: Sequence[RoundValues]) -> None:
        for done, seconds, points in rounds:
            for name, value in points.items():
                self._writer.add_scalar(name, value, done, self._began + seconds)
            if self._draws and done and (state := self._store.state(State, done)) is not None:
                at = self._began + seconds
                self._writer.add_histogram("directions/probability", importance(state), done, "auto", at)
        self._writer.flush()

    def close(self, ended: bool) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of MLflow; the project is its experiment. A point that comes twice is one there."""

    module, install = "mlflow", "pip install 'fedkseed[trackers]'"

    def __init__(self, store: Store, continued: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client, self._began = MlflowClient(), store.recipe.stat().st_mtime  # seconds since 1970
        if continued is not None:
            self.id = continued
            with suppress(MlflowException):  # MLflow's own store may be another one than before
                self._client.update_run(continued, status="RUNNING")
                return
        recipe = store.load_recipe()
        experiment = self._client.get_experiment_by_name(recipe.report.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(recipe.report.project)
        self.id = self._client.create_run(number, run_name=store.directory.resolve().name).info.run_id
        params = [Param(name, str(value)) for name, value in settings(recipe).items()]
        for k in range(0, len(params), 100):  # its limit
            self._client.log_batch(self.id, params=params[k : k + 100])

    def write(self, rounds: Sequence[RoundValues]) -> None:
        from mlflow.entities import Metric

        allowed = re.compile(r"[^\w\-. :/]", re.ASCII)  # it refuses names with other characters
        metrics = [
            Metric(allowed.sub("_", name), value, int(1000 * (self._began + seconds)), done)
            for done, seconds, points in rounds
            for name, value in points.items()
        ]
        for k in range(0, len(metrics), 1000):  # its limit
            self._client.log_batch(self.id, metrics=metrics[k : k + 1000])

    def close(self, ended: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if ended else "KILLED")


class Trackio(Tracker):
    """A run of Trackio, whose name is its id."""

    module, install = "trackio", "pip install trackio"

    def __init__(self, store: Store, continued: str | None) -> None:
        self._trackio, recipe = import_module("trackio"), store.load_recipe()
        self.id = continued or f"{store.directory.resolve().name}-{secrets.token_hex(2)}"
        with redirect_stdout(io.StringIO()):  # it prints greetings, and stdout may be a JSON document
            self._run = self._trackio.init(
                recipe.report.project, name=self.id, resume="allow", config=settings(recipe), embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def close(self, ended: bool) -> None:
        with redirect_stdout(io.StringIO()):
            # of this run; the run's own leaves it to be finished again, aloud, when the process ends
            self._trackio.finish()


class WandB(Tracker):
    """A run of Weights & Biases: offline, in the folder `wandb` of the run's directory, unless WANDB_MODE says else."""

    module, install = "wandb", "pip install 'fedkseed[trackers]'"

    def __init__(self, store: Store, continued: str | None) -> None:
        import wandb

        self.id = continued or secrets.token_hex(4)
        directory, recipe = store.directory.resolve(), store.load_recipe()
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=recipe.report.project, name=directory.name, id=self.id, resume="allow", config=settings(recipe),
            mode=mode, dir=os.environ.get("WANDB_DIR", directory),
            # Neither the terminal's text nor the machine's programs and its load, which nobody has asked for.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True,
                x_disable_meta=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def close(self, ended: bool) -> None:
        self._run.finish(exit_code=0 if ended else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio, "mlflow": MLflow, "wandb": WandB}
