"""A run as TensorBoard event files, in the folder `tensorboard` of its directory.

They are a copy of what the store holds, like metrics.jsonl, and every process that works on the run starts
them afresh: a run that was killed, resumed or rolled back has every round once.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import FedKSeedError
from ..evaluation.statistics import estimate
from ..files import border
from ..recipe.reading import load_recipe
from ..round import Report
from ..run.metrics import SUMS, values
from ..run.progress import Progress
from ..run.store import Store
from ..strategies.kseed import importance
from .report import kseed_state, rounds


class EventFiles:
    """Watches a run, writes after every round what is new in its store, and passes all on to another watcher.

    Raises:
        FedKSeedError: the package tensorboard is missing.
    """

    def __init__(self, directory: Path, inner: Progress) -> None:
        self.directory, self.inner = directory, inner
        self.make_writer = _writer_class()  # now, and not after the first round
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
        """Write what the store has and the files have not."""
        store, folder = Store(self.directory), self.directory / "tensorboard"
        algorithm, began = load_recipe(store.recipe).training.algorithm, store.recipe.stat().st_mtime
        with border(f"can't write {folder}"):
            if self.writer is None:
                for old in folder.glob("events.out.tfevents.*"):
                    old.unlink()
                self.writer = self.make_writer(str(folder), purge_step=0)  # who reads along forgets the old files
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
    """Every number of a run that has a curve: name, rounds done, seconds of training by then, value."""
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
            yield "loss/held-out", done, elapsed[done], estimate(scores["losses"]).mean
            if scores["rouge"]:
                yield "Rouge-L", done, elapsed[done], estimate(scores["rouge"]).mean


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise FedKSeedError(
            "event files need the package tensorboard; install it with: pip install 'fedkseed[plots]'"
        ) from error
    return SummaryWriter
