"""Progress bars of a run on the terminal, with a line for each round and each note."""

import time
from collections.abc import Collection
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ..run.round_metrics import line
from ..run.time_left import RoundPace
from .terminal import QUIET, VERBOSE, console, shown_level

if TYPE_CHECKING:
    from ..round import Report


class TimeLeft(ProgressColumn):
    """The time until a bar's end, which counts down between two steps.

    The column of `rich` forgets steps that were more than 30 s ago, and so shows no time for rounds of a minute.
    """

    max_refresh = 0.5  # seconds

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        remaining = "-:--:--" if ends is None else timedelta(seconds=max(0, round(ends - time.time())))
        return Text(str(remaining), style="progress.remaining")


class Bars:
    """Progress on the terminal: one bar for the rounds, if there are any, and one for the present activity."""

    def __init__(self, rounds: int) -> None:
        self.level = shown_level.get()
        columns = (
            TextColumn("{task.description:34}", markup=False),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeLeft(),
        )
        self.bars = Progress(
            *columns, TextColumn("{task.fields[extra]}", markup=False), console=console, transient=True,
            disable=self.level == QUIET,
        )  # fmt: skip
        self.rounds = self.bars.add_task("rounds", total=rounds, extra="", ends=None, visible=rounds > 0)
        self.now = self.bars.add_task("", total=1, extra="", ends=None, visible=False)
        self.pace, self.began = RoundPace(), 0.0  # the second: when the present activity began
        self.total = rounds
        self.bytes = 0

    def __enter__(self) -> "Bars":
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def note(self, text: str) -> None:
        if self.level != QUIET:
            self._say(Text(text, style="dim"))

    def begin(self, what: str, total: int) -> None:
        if self.level == VERBOSE:
            self.note(f"{what}: {total} steps")
        self.bars.reset(self.now, total=total, description=what, visible=True, extra="", ends=None)
        self.began = time.time()

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.bars.update(self.now, advance=count)
        done, now = self._of(self.now).completed, time.time()
        if done:
            steps = (self._of(self.now).total or done) - done
            self.bars.update(self.now, ends=now + (now - self.began) / done * steps)
        if loss is not None:
            self.bars.update(self.now, extra=f"loss {loss:.3f}")

    def round_done(self, report: "Report") -> None:
        self.bytes += report.bytes_total
        self.bars.update(self.rounds, completed=report.round, extra=f"{self.bytes / 1000:.1f} kB so far")
        self.count_round(report.seconds)
        text = f"round {report.round + 1:3} of {self.total}   {line(asdict(report))}"
        if self.level != QUIET:
            self._say(Text(text))

    def clients(self, numbers: Collection[int], standing: str) -> None:
        """Show nothing: the bar of the present activity says enough, and `fedkseed watch` says more."""

    def count_round(self, seconds: float) -> None:
        """Advance the bar of the rounds by one, which took some seconds."""
        self.pace.round_done(seconds)
        self.bars.update(self.rounds, advance=1)
        task = self._of(self.rounds)
        self.bars.update(self.rounds, ends=self.pace.end(int((task.total or 0) - task.completed)))

    def _say(self, text: Text) -> None:
        """Print a line above the bars: on a terminal as wide as that, in a log in one piece."""
        self.bars.console.print(text, highlight=False, soft_wrap=not console.is_terminal)

    def _of(self, number: TaskID) -> Task:
        return self.bars.tasks[self.bars.task_ids.index(number)]
