"""Copies of a run's numbers for trackers of experiments: TensorBoard, MLflow, Trackio, Weights & Biases.

The copies are made of what is in the store, as metrics.jsonl is, so a tracker has each round once, even if the run was
killed and resumed: the store keeps, as the fact TRACKED, what each tracker is known to have and up to which head of
the chain. After a rollback the head is another, and the copy begins anew, under another id.

By default all of it stays on this machine. What a tracker's own environment variables say comes first: WANDB_MODE,
MLFLOW_TRACKING_URI, TRACKIO_DIR. A tracker that fails is left out for the rest of the process, and the run goes on.
"""

import io
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import FedKSeedError
from ..evaluation.statistics import Evaluation, title_of
from ..recipe.algorithms import ALGORITHMS
from ..recipe.schema import Recipe
from ..round import Report
from ..strategies.kseed import State, importance
from .progress import Passing, Progress
from .round_metrics import SUMS, values
from .store import Store

CURVES = {"loss": "loss/held-out", "rouge": "Rouge-L"}  # other metrics: held-out/TITLE
TRACKED = "tracked"  # the fact with the id, the number of rounds and the head of each tracker's copy
QUIET = {  # settings by which packages would send word of their use
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


class Point(NamedTuple):
    """A point of a curve."""

    name: str
    done: int  # rounds
    seconds: float  # of training by then
    value: float


@dataclass(frozen=True, slots=True)
class About:
    """The description of a run that a tracker gets."""

    name: str
    project: str
    directory: Path
    settings: dict[str, Any]  # of the recipe, without paths
    began: float  # seconds since 1970

    @classmethod
    def of(cls, store: Store) -> "About":
        recipe, place = store.load_recipe(), store.directory.resolve()
        return cls(place.name, recipe.report.project, place, settings(recipe), store.recipe.stat().st_mtime)


class Tracker(Protocol):
    """One copy: made or, by its id, continued for a run."""

    id: str

    def write(self, points: Sequence[Point]) -> None:
        """Add points, of whole rounds and in their order."""
        ...

    def close(self, ended: bool) -> None: ...


class Trackers(Passing):
    """A watcher that hands the numbers of each round to trackers, and passes calls on to another.

    A round is handed on when the next is done, or when the run ends: then its evaluation has come, too.

    Args:
        names: keys of TRACKERS.

    Raises:
        FedKSeedError: a package is missing.
    """

    def __init__(self, names: Collection[str], inner: Progress) -> None:
        super().__init__(inner)
        self.names = list(dict.fromkeys(names))
        for name in self.names:
            require(name)
        self._open: dict[str, Tracker] = {}
        self._store: Store | None = None

    @contextmanager
    def copying(self, directory: Path) -> Iterator[None]:
        """Copy from the store of a run, whose lock the caller holds, until the end of the `with` block."""
        ended, self._store = False, Store(directory)
        try:
            yield
            self._hand_on(self._store, whole=True)
            ended = True
        finally:
            for name, tracker in self._open.items():
                self._try(name, lambda tracker=tracker: tracker.close(ended))
            self._open, self._store = {}, None

    def round_done(self, report: Report) -> None:
        super().round_done(report)
        if self._store is not None and self.names:
            self._hand_on(self._store, whole=False)

    def _hand_on(self, store: Store, whole: bool) -> None:
        """Give each tracker the rounds that it lacks; `whole`: also the last one."""
        if not self.names or not store.begun:
            return
        known, points = store.recall(TRACKED) or {}, list(scalars(store))
        last = store.rounds - (not whole)
        for name in list(self.names):
            before = _sound(store, known.get(name))
            after = -1 if before is None else before["done"]
            new = [point for point in points if after < point.done <= last]
            if name not in self._open:
                identity = None if before is None else before["id"]
                made = self._try(name, lambda name=name, identity=identity: TRACKERS[name](About.of(store), identity))
                if made is None:
                    continue
                self._open[name] = made
                if made.id != identity:
                    new = [point for point in points if point.done <= last]
            tracker = self._open[name]
            if not new or self._try(name, lambda tracker=tracker, new=new: tracker.write(new) or True):
                known[name] = {"id": tracker.id, "done": last, "head": store.head(last).hex()}
        store.remember(TRACKED, known)

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of a call of a package; None and no further calls if it fails."""
        try:
            return call()
        except Exception as error:  # of any kind: the run is worth more than its copy
            text = str(error).strip().splitlines() or [type(error).__name__]
            self.note(f"{name} gets no more numbers ({text[0][:200]}); `fedkseed resume` hands on what it lacks")
            self.names = [other for other in self.names if other != name]
            return None


def _sound(store: Store, known: Any) -> Any:
    """The account of a copy, if its rounds are still those of the run."""
    if known is None or not -1 < known["done"] <= store.rounds:
        return None
    return known if store.head(known["done"]).hex() == known["head"] else None


def require(name: str) -> None:
    """Refuse a tracker whose package is missing, with the line that installs it."""
    module, line = PACKAGES[name]
    os.environ.update({key: os.environ.get(key, value) for key, value in QUIET.items()})  # before the import reads them
    try:
        import_module(module)
    except ImportError as error:
        raise FedKSeedError(f"{name} needs a package that is missing ({error}); install it with: {line}") from error


def scalars(store: Store) -> Iterator[Point]:
    """All points of a run's curves, in the order of the rounds."""
    reports = store.reports()
    scores = {done: Evaluation.of(found).means for done, found in store.evaluations().items()}
    elapsed = [0.0, *accumulate(report.get("seconds", 0.0) for report in reports)]
    sums = {metric.name: 0.0 for metric in SUMS}
    for done, seconds in enumerate(elapsed):
        found: dict[str, float] = {}
        if done:
            report = reports[done - 1]
            for metric in SUMS:
                sums[metric.name] += metric.value(report) or 0
            found = values(report) | sums
        means = scores.get(done, {})
        found |= {CURVES.get(name, f"held-out/{title_of(name)}"): mean for name, mean in means.items()}
        for name, value in found.items():
            yield Point(name, done, seconds, value)


def settings(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe that a reader compares runs by; of paths, the last part."""
    table, found = recipe.model_dump(exclude_none=True, mode="json"), dict[str, Any](seed=recipe.seed)
    for part in ("model", "data", "clients", "directions", "training"):
        for key, value in table[part].items():
            if isinstance(value, str | int | float):
                found[f"{part}.{key}"] = Path(value).name if isinstance(value, str) and "/" in value else value
    return found


def _by_round(points: Sequence[Point]) -> dict[int, dict[str, float]]:
    rounds: dict[int, dict[str, float]] = {}
    for point in points:
        rounds.setdefault(point.done, {})[point.name] = point.value
    return rounds


class TensorBoard:
    """Event files in the folder `tensorboard` of the run's directory; each process replaces those of the one before."""

    def __init__(self, about: About, known: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.id, folder = secrets.token_hex(4), about.directory / "tensorboard"  # never the known one
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._began = about.began
        self._writer: Any = SummaryWriter(str(folder), purge_step=0)  # lets a running TensorBoard drop old data
        store = Store(about.directory)
        algorithm = store.load_recipe().training.algorithm
        self._states = store if algorithm in ALGORITHMS and ALGORITHMS[algorithm].pooled else None

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._writer.add_scalar(point.name, point.value, point.done, self._began + point.seconds)
        for done, seconds in {point.done: point.seconds for point in points if point.done}.items():
            state = self._states.state(State, done) if self._states else None
            if state is not None:
                self._writer.add_histogram(
                    "directions/probability", importance(state), done, "auto", self._began + seconds
                )
        self._writer.flush()

    def close(self, ended: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow; the project is its experiment. A point that comes twice is one there."""

    def __init__(self, about: About, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client, self._began = MlflowClient(), about.began
        if known is not None:
            self.id = known
            with suppress(MlflowException):  # MLflow's own store may be another one than before
                self._client.update_run(known, status="RUNNING")
                return
        found = self._client.get_experiment_by_name(about.project)
        experiment = self._client.create_experiment(about.project) if found is None else found.experiment_id
        self.id = self._client.create_run(experiment, run_name=about.name).info.run_id
        params = [Param(name, str(value)) for name, value in about.settings.items()]
        for k in range(0, len(params), 100):  # its limit
            self._client.log_batch(self.id, params=params[k : k + 100])

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        allowed = re.compile(r"[^\w\-. :/]", re.ASCII)  # it refuses names with other characters
        named = [(allowed.sub("_", p.name), p.value, int(1000 * (self._began + p.seconds)), p.done) for p in points]
        metrics = [Metric(*one) for one in named]
        for k in range(0, len(metrics), 1000):  # its limit
            self._client.log_batch(self.id, metrics=metrics[k : k + 1000])

    def close(self, ended: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if ended else "KILLED")


class Trackio:
    """A run of Trackio, whose name is its id."""

    def __init__(self, about: About, known: str | None) -> None:
        trackio = import_module("trackio")
        self.id = known or f"{about.name}-{secrets.token_hex(2)}"
        with redirect_stdout(io.StringIO()):  # it prints greetings, and stdout may be a JSON document
            self._run: Any = trackio.init(
                about.project, name=self.id, resume="allow", config=about.settings, embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip

    def write(self, points: Sequence[Point]) -> None:
        for done, found in _by_round(points).items():
            self._run.log(found, step=done)

    def close(self, ended: bool) -> None:
        trackio = import_module("trackio")
        with redirect_stdout(io.StringIO()):
            trackio.finish()  # of this run; the run's own leaves it to be finished again, aloud, when the process ends


class WandB:
    """A run of Weights & Biases: offline, in the folder `wandb` of the run's directory, unless WANDB_MODE says else."""

    def __init__(self, about: About, known: str | None) -> None:
        import wandb

        self.id = known or secrets.token_hex(4)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=about.project, name=about.name, id=self.id, resume="allow", config=about.settings,
            mode=mode, dir=os.environ.get("WANDB_DIR", about.directory),
            # Neither the terminal's text nor the machine's programs and its load, which nobody has asked for.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True,
                x_disable_meta=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def write(self, points: Sequence[Point]) -> None:
        for done, found in _by_round(points).items():
            self._run.log(found, step=done)

    def close(self, ended: bool) -> None:
        self._run.finish(exit_code=0 if ended else 1)


TRACKERS: dict[str, Callable[[About, str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": MLflow,
    "wandb": WandB,
}
PACKAGES = {  # of each tracker: the module it needs, and the line that installs it
    "tensorboard": ("torch.utils.tensorboard", "pip install 'fedkseed[plots]'"),
    "trackio": ("trackio", "pip install trackio"),
    "mlflow": ("mlflow", "pip install 'fedkseed[trackers]'"),
    "wandb": ("wandb", "pip install 'fedkseed[trackers]'"),
}
