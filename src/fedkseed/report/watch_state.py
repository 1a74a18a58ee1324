"""The state of a run as its directory shows it: not begun, running, stopped or ended, and how far; also in lines.

Nothing here writes into the directory or takes the run's lock, and the store is read only after it has changed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ..errors import FedKSeedError
from ..evaluation.statistics import Evaluation, title_of
from ..files import locked
from ..run.activity import Activity, moment_of
from ..run.progress import duration
from ..run.round_metrics import line
from ..run.store import STOPPED, Store

SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True, slots=True)
class RunView:
    """The state of a run at one moment."""

    name: str
    state: Literal["not begun", "running", "stopped", "ended"] = "not begun"
    text: str = ""  # the state in words, with its reason
    about: str = ""  # algorithm and model
    planned: int = 0  # rounds; 0: the run has no directory yet
    done: int = 0
    sent: int = 0  # bytes of all rounds and clients, down and up
    left: float | None = None  # seconds until the last round, about; None where nothing is known of it, or all is done
    moment: Activity | None = None
    reports: Sequence[Mapping[str, Any]] = ()  # of the rounds, as the store keeps them
    means: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # of evaluations, by rounds done and metric
    best: int | None = None  # this field and the next: see `Result`
    stopped: str | None = None
    timed: bool = False  # whether clients are unlike in speed, or rounds asynchronous: else virtual time counts steps
    version: str = ""  # of what the store holds; another one: a round or an evaluation has come, or was undone

    @classmethod
    def of(cls, store: Store, version: str = "") -> "RunView":
        """The content of a run's store."""
        recipe, reports = store.load_recipe(), store.reports()
        return cls(
            name=store.directory.resolve().name,
            about=f"{recipe.training.algorithm} tunes {Path(recipe.model.name).name}",
            planned=recipe.training.rounds,
            done=len(reports),
            reports=reports,
            sent=sum(report["bytes_total"] for report in reports),
            means={done: Evaluation.of(scores).means for done, scores in store.evaluations().items()},
            best=store.tuned,
            stopped=store.recall(STOPPED),
            timed=recipe.asynchronous is not None or recipe.clients.slow_share > 0,
            version=version,
        )

    @property
    def notes(self) -> list[str]:
        """The latest notes of the process that works on the run, each with its time of day."""
        notes = self.moment.notes if self.moment else []
        return [f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}" for at, text in notes]


class Watched:
    """A run that is looked at again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last_read = RunView(directory.resolve().name)

    def look(self) -> RunView:
        """The run's present state. A store that can't be read now, as amid a rollback, is read at the next look."""
        directory, trouble = self.directory, ""
        if (directory / "recipe.toml").is_file():
            version = "new"
            with suppress(FileNotFoundError):
                status = (directory / "run.sqlite").stat()  # before reading: a commit between makes the next look read
                version = f"{status.st_mtime_ns} {status.st_size}"
            if version != self._last_read.version:
                try:
                    self._last_read = RunView.of(Store(directory, looks=True), version)
                except FedKSeedError as error:
                    trouble = f" (it can't be read at this moment: {error})"
        else:
            self._last_read = RunView(self._last_read.name)
        view, moment = self._last_read, moment_of(directory)
        if not view.planned:
            return replace(view, text=f"{directory} holds no run yet{trouble}")
        if locked(directory / "lock"):
            left = remaining(view, moment, time.time())
            return replace(view, state="running", text=f"running{trouble}", moment=moment, left=left)
        if moment is None and (view.stopped or view.done == view.planned):
            text = f"ended early: {view.stopped}" if view.stopped else "ended"
            return replace(view, state="ended", text=text + trouble)
        if view.version == "new" or (not view.reports and moment is None):
            return replace(view, text=f"not begun{trouble}")
        why = f": {moment.error}" if moment and moment.error else ""
        served = any((directory / transport / "server.lock").exists() for transport in ("flower", "https"))
        how = "the same command of the server goes on" if served else f"it goes on with: fedkseed resume {directory}"
        return replace(view, state="stopped", text=f"stopped{why}; {how}{trouble}", moment=moment)


def remaining(view: RunView, moment: Activity | None, now: float) -> float | None:
    """The seconds until the last round, from the pace of this process or else of the rounds that are done.

    The first round of a run has no pace: the share of its clients that have answered stands in for it.
    """
    rounds = view.planned - view.done
    if not rounds or moment is None:
        return None
    elapsed, pace = max(0.0, now - moment.since), moment.pace  # of the present round
    if pace is None and view.reports:
        pace = fmean(report.get("seconds", 0.0) for report in view.reports)
    if not pace and (answered := len(moment.clients.get("answered", ()))):
        pace = elapsed * sum(map(len, moment.clients.values())) / answered
    return max(0.0, pace * rounds - elapsed) if pace else None


def follow(directory: Path, say: Callable[[str], None]) -> None:
    """Say all that a run has done and does, until it has ended; one that has stopped may go on."""
    watched, teller = Watched(directory), Teller(say)
    while teller.tell(watched.look()) != "ended":
        time.sleep(SECONDS_BETWEEN_LOOKS)


class Teller:
    """The lines of one view after the other, each line once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.done = say, 0
        self._scored = set[int]()  # evaluations that were said, by the rounds before them
        self._noted = 0.0  # time of the last note that was said
        self._text = ""

    def tell(self, view: RunView) -> str:
        """Say what is new in a view; returns the run's state."""
        if view.state != "ended":  # whose line is the last
            self._tell_state(view)
        for at, text in view.moment.notes if view.moment else ():
            if at > self._noted:
                self._noted = at
                self.say(text)
        if view.done < self.done:
            self.say(f"back at {view.done} finished rounds")
            self.done, self._scored = view.done, {done for done in self._scored if done <= view.done}
        for done in range(self.done, view.done + 1):
            if done > self.done:
                ends = f"   about {duration(view.left)} left" if done == view.done and view.left else ""
                self.say(f"round {done:3} of {view.planned}   {line(view.reports[done - 1])}{ends}")
            if done in view.means and done not in self._scored:
                self._scored.add(done)
                scores = "   ".join(f"{title_of(name)} {mean:.4f}" for name, mean in view.means[done].items())
                self.say(f"{f'after {done} rounds' if done else 'base model'}   {scores}")
        self.done = view.done
        self._tell_state(view)
        return view.state

    def _tell_state(self, view: RunView) -> None:
        if view.text != self._text:
            self._text = view.text
            self.say(f"{view.name}: {view.text}")
