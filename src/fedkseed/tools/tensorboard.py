"""A run as TensorBoard event files, in the folder `tensorboard` of its directory.

The files are a copy of data in the store, as metrics.jsonl is. Each process that works on the run replaces the files
of the one before, so that each round is in them once, even if the run was killed, resumed or rolled back.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import FedKSeedError
from ..evaluation.statistics import Evaluation, title_of
from ..files import border
from ..round import Report
from ..run.metrics import SUMS, values
from ..run.store import Store
from ..run.watchers import Progress
from ..strategies.kseed import importance
from .report import kseed_state, rounds

CURVES = {"loss": "loss/held-out", "rouge": "Rouge-L"}  # other metrics: held-out/TITLE


class EventFiles:
    """A watcher that writes new data of the store to event files after every round, and passes calls on to another.

    Raises:
        FedKSeedError: the package tensorboard is missing.
    """

    def __init__(self, directory: Path, inner: Progress) -> None:
        self.directory, self.inner = directory, inner
        self.make_writer = _writer_class()  # here, so that a missing package is refused before the first round
        self.writer: Any = None
        self.written: set[tuple[str, int]] = set()  # name, rounds done

    def __enter__(self) -> "EventFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # after a refusal it may be the directory of another run
            self.write()
        if self.writer is not None:
            self.writer.close()

    def note(self, text: str) -> None:
        self.inner.note(text)

    def begin(self, what: str, total: int) -> None:
        self.inner.begin(what, total)

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.inner.advance(count, loss)

    def round_done(self, report: Report) -> None:
        self.inner.round_done(report)
        self.write()

    def write(self) -> None:
        """Write the rounds and evaluations that are in the store but not yet in the files."""
        store, folder = Store(self.directory), self.directory / "tensorboard"
        algorithm, began = store.load_recipe().training.algorithm, store.recipe.stat().st_mtime
        with border(f"can't write {folder}"):
            if self.writer is None:
                for old in folder.glob("events.out.tfevents.*"):
                    old.unlink()
                self.writer = self.make_writer(str(folder), purge_step=0)  # lets a running TensorBoard drop old data
            for name, done, seconds, value in scalars(store):
                if self._is_new(name, done):
                    self.writer.add_scalar(name, value, done, began + seconds)
            for report in rounds(store):
                done = report["done"]
                state = kseed_state(store, algorithm, done) if self._is_new("directions", done) else None
                if state is not None:
                    at = began + report["seconds_total"]
                    self.writer.add_histogram("directions/probability", importance(state), done, "auto", at)
            self.writer.flush()

    def _is_new(self, name: str, done: int) -> bool:
        new = (name, done) not in self.written
        self.written.add((name, done))
        return new


def scalars(store: Store) -> Iterator[tuple[str, int, float, float]]:
    """All points of a run's curves: name, rounds done, seconds of training by then, value."""
    sums = {metric.name: 0.0 for metric in SUMS}
    elapsed = {0: 0.0}
    for report in rounds(store):
        done = report["done"]
        elapsed[done] = report["seconds_total"]
        for metric in SUMS:
            sums[metric.name] += metric.value(report) or 0
        for name, value in (values(report) | sums).items():
            yield name, done, elapsed[done], value
    for done, scores in store.evaluations().items():
        if done in elapsed:
            for name, mean in Evaluation.of(scores).means.items():
                yield CURVES.get(name, f"held-out/{title_of(name)}"), done, elapsed[done], mean


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise FedKSeedError(
            "event files need the package tensorboard; install it with: pip install 'fedkseed[plots]'"
        ) from error
    return SummaryWriter
