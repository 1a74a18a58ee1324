"""Progress of a command: bars on a terminal, lines in a log, and in both a line for each round and each note."""

import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ..run.progress import RoundPace, Silent, duration
from ..run.round_metrics import line
from .terminal import QUIET, VERBOSE, console, note, shown_level

if TYPE_CHECKING:
    from ..round import Report

# In a log, from one line to the next: as a phase begins before the first round, and within phases and rounds.
SECONDS_BETWEEN_PHASES, SECONDS_BETWEEN_LINES = 2, 30


class TimeLeft(ProgressColumn):
    """The time until a bar's end, which counts down between two steps.

    The column of `rich` forgets steps that were more than 30 s ago, and so shows no time for rounds of a minute.
    """

    max_refresh = 0.5  # seconds

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        remaining = "-:--:--" if ends is None else timedelta(seconds=max(0, round(ends - time.time())))
        return Text(str(remaining), style="progress.remaining")


class Bars(Silent):
    """Progress on the terminal: one bar for the rounds, if there are any, and one for the present activity."""

    def __init__(self, rounds: int) -> None:
        self.level = shown_level.get()
        what, extra = (TextColumn(text, markup=False) for text in ("{task.description:34}", "{task.fields[extra]}"))
        columns = what, BarColumn(24), MofNCompleteColumn(), TimeLeft(), extra
        self.in_log, quiet = not (console.is_terminal or console.is_jupyter), self.level == QUIET
        self.bars = Progress(*columns, console=console, transient=True, disable=self.in_log or quiet)
        self.rounds = self.bars.add_task("rounds", total=rounds, extra="", ends=None, visible=rounds > 0)
        self.now = self.bars.add_task("", total=1, extra="", ends=None, visible=False)
        self.pace, self.began = RoundPace(), 0.0  # the second: when the present activity began
        self.total, self.bytes, self.said = rounds, 0, 0.0  # the third: when the last line was printed

    def __enter__(self) -> "Bars":
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def note(self, text: str, style: str = "dim") -> None:
        self.said = time.time()
        note(text, style)

    def begin(self, what: str, total: int) -> None:
        if self.level == VERBOSE:
            self.note(f"{what}: {total} steps")
        self.bars.reset(self.now, total=total, description=what, visible=True, extra="", ends=None)
        self.began = time.time()
        self._log(SECONDS_BETWEEN_PHASES if self.pace.seconds is None else SECONDS_BETWEEN_LINES)

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.bars.update(self.now, advance=count)
        task, now = self.bars.tasks[self.now], time.time()
        if done := task.completed:
            self.bars.update(self.now, ends=now + (now - self.began) / done * ((task.total or done) - done))
        if loss is not None:
            self.bars.update(self.now, extra=f"loss {loss:.3f}")
        self._log(SECONDS_BETWEEN_LINES)

    def round_done(self, report: "Report") -> None:
        self.bytes += report.bytes_total
        self.bars.update(self.rounds, completed=report.round, extra=f"{self.bytes / 1000:.1f} kB so far")
        self.count_round(report.seconds)
        left = self._left(self.rounds) if self.in_log else ""
        self.note(f"round {report.round + 1:3} of {self.total}   {line(asdict(report))}{left}", "")

    def count_round(self, seconds: float) -> None:
        """Advance the bar of the rounds by one, which took some seconds."""
        self.pace.round_done(seconds)
        self.bars.update(self.rounds, advance=1)
        task = self.bars.tasks[self.rounds]
        self.bars.update(self.rounds, ends=self.pace.end(int((task.total or 0) - task.completed)))

    def _log(self, seconds: float) -> None:
        """Print how far the present activity is, where there are no bars and the last line is some seconds old."""
        if self.in_log and time.time() - self.said >= seconds:
            task = self.bars.tasks[self.now]
            self.note(f"{task.description}: {task.completed:,.0f} of {task.total:,.0f} steps{self._left(self.now)}")

    def _left(self, bar: TaskID) -> str:
        ends = self.bars.tasks[bar].fields["ends"]
        return "" if ends is None else f", about {duration(max(0, ends - time.time()))} left"
