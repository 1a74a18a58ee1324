"""Terminal output of a run: progress bars, a table of its rounds, and tables of its results.

This module does not import PyTorch, so that commands that only read a run start at once.
"""

import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from contextvars import ContextVar
from dataclasses import asdict, replace
from datetime import timedelta
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from ..evaluation.statistics import (
    BALANCED,
    NOT_EVALUATED,
    Answer,
    Choice,
    Confusion,
    Evaluation,
    Gain,
    McNemar,
    counted,
    estimate,
    gain_of_all,
    gains_table,
    most_frequent,
    named,
    paired_change,
    title_of,
)
from ..run.round_metrics import line, telling
from ..run.time_left import RoundPace

if TYPE_CHECKING:
    from ..round import Report
    from ..run.loop import Result

console = Console(markup=False)  # paths and texts of users may hold brackets
QUIET, USUAL, VERBOSE = range(3)
MOST_CLIENTS = 20  # of the table of gains; of more, those that gained most and those that lost most
_level: ContextVar[int] = ContextVar("level", default=USUAL)  # of what a command shows beside its results


@contextmanager
def showing(level: int, as_json: bool = False) -> Iterator[None]:
    """Show more or less than usual of a command's progress; with `as_json`, all but the document goes to stderr."""
    before, token = console.stderr, _level.set(level)
    console.stderr = as_json or before
    try:
        yield
    finally:
        console.stderr = before
        _level.reset(token)


@contextmanager
def own_bars_alone() -> Iterator[None]:
    """Hide the bars that another library shows on stderr, where no progress is wanted."""
    with redirect_stderr(StringIO()) if _level.get() == QUIET else nullcontext():
        yield


def print_error(error: BaseException) -> None:
    """Print a refusal as one line on stderr; where more is shown, its origin in the program before it."""
    if _level.get() == VERBOSE:
        traceback.print_exception(error)
    print(f"fedkseed: {error}", file=sys.stderr)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout: numbers that are not finite are null, objects are text."""
    print(json.dumps(_jsonable(document), indent=1, ensure_ascii=False, default=str))


def _jsonable(value: Any) -> Any:
    """A value whose numbers that JSON can't write are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(one) for one in value]
    return value


class TimeLeft(ProgressColumn):
    """The time until a bar's end, which counts down between two steps.

    The column of `rich` forgets steps that were more than 30 s ago, and so shows no time for rounds of a minute.
    """

    max_refresh = 0.5  # seconds

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        left = "-:--:--" if ends is None else timedelta(seconds=max(0, round(ends - time.time())))
        return Text(str(left), style="progress.remaining")


class Bars:
    """Progress on the terminal: one bar for the rounds, if there are any, and one for the present activity."""

    def __init__(self, rounds: int) -> None:
        self.level = _level.get()
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
            left = (self._of(self.now).total or done) - done
            self.bars.update(self.now, ends=now + (now - self.began) / done * left)
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


def print_rounds(
    reports: Iterable[Mapping[str, Any]],
    evaluations: Mapping[int, Mapping[str, Any]] = {},
    best: int | None = None,
    stopped: str | None = None,
) -> None:
    """Print a table with one row a round, from reports and evaluations as the store keeps them.

    Where there are evaluations, round 0 is the base model.

    Args:
        best, stopped: see `Result`.
    """
    known = {report["round"] + 1: report for report in reports}
    metrics = telling(known.values())
    means = {done: Evaluation.of(found).means for done, found in evaluations.items()}
    names = list(dict.fromkeys(name for found in means.values() for name in found))
    rows = [
        [
            str(done),
            *(metric.text(known[done]) if done in known else "" for metric in metrics),
            *(f"{means[done][name]:.4f}" if name in means.get(done, {}) else "" for name in names),
        ]
        for done in sorted(known.keys() | means.keys())
    ]
    head = ["round", *(metric.title for metric in metrics), *map(title_of, names)]
    needed = [  # a title may be broken between words, a number must not be cut
        max(len(word) for word in [*title.split(), *cells]) for title, *cells in zip(head, *rows, strict=True)
    ]
    wide = sum(needed) + 3 * len(needed) + 1 <= console.width
    table = Table(padding=(0, int(wide)))
    for title, width in zip(head, needed, strict=True):
        table.add_column(title, justify="right", min_width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table, width=max(console.width, sum(needed) + len(needed) + 1), crop=False, soft_wrap=True)
    _print_choice(best, stopped)


def print_result(result: "Result") -> None:
    before, after, reports = result.before, result.after, result.reports
    table = Table("measure", "before", "after", "change", title=_tuned(result))

    def compare(what: str, before: Sequence[float], after: Sequence[float]) -> None:
        change = paired_change(before, after)
        table.add_row(what, f"{estimate(before)}", f"{estimate(after)}", change.text("+"))

    for of, then in before.every.items():
        now = after.every[of]
        for name, values in then.measures.items():
            unit = " (nats a token)" if name == "loss" else ""
            title = f"{title_of(name)}, {counted(name, len(values))}{unit}"
            compare(named(of, title), values, now.measures[name])
        if then.empty:
            rates = [f"{sum(e.empty) / len(e.empty):.0%}" for e in (then, now)]
            table.add_row(named(of, "empty outputs"), *rates, "")
        if then.choices:
            means, shares = [e.means[BALANCED] for e in (then, now)], [frequent(e.choices) for e in (then, now)]
            table.add_row(named(of, BALANCED), *(f"{mean:.4f}" for mean in means), f"{means[1] - means[0]:+.4f}")
            table.add_row(named(of, "most frequent choice"), *map(Text, shares), "")
            table.add_row(named(of, "McNemar's exact test"), "", "", tested(then, now))
    if before.losses:
        console.print(table)
        for of, now in after.every.items():
            print_confusion(now.choices, of)
        print_gains(result.gains)
        _print_answers(before.answers, after.answers)
        _print_choice(result.best, result.stopped)
    else:
        console.print(f"{_tuned(result)}; nothing was evaluated here", highlight=False)
        print_gains(result.gains)
    costs = Table("cost", Column("value", overflow="fold"))  # a digest must not be cut
    if reports:
        down, up = max(r["bytes_down"] for r in reports), max(r["bytes_up"] for r in reports)
        costs.add_row("bytes a client and round", f"{down:,} down + {up:,} up = {down + up:,}")
        for what, numbers in (("all tuned weights", result.weights), ("a LoRA of rank 8", result.lora)):
            if numbers and 8 * numbers > down + up:
                costs.add_row(f"{what}, as float32 both ways", f"{8 * numbers:,}")
    if result.output is not None:
        size = sum(file.stat().st_size for file in (result.output, *result.output.rglob("*")) if file.is_file())
        costs.add_row("the tuned model", f"{size:,} bytes")
    costs.add_row("peak memory", f"{result.peak_memory / 1e9:.2f} GB")
    if result.step_seconds is not None:
        costs.add_row("a local step (median)", f"{result.step_seconds:.2f} s")
    if result.sync_seconds is not None:
        costs.add_row("sync to the latest model", f"{result.sync_seconds:.2g} s")
    costs.add_row("digest of the tuned model", result.digest or "not known without the model")
    console.print(costs)
    if result.output is not None:
        console.print(f"the tuned model is {result.output}", highlight=False)


def print_scores(scores: Evaluation, base: Evaluation) -> None:
    """Print the scores of a model on all sets, and their changes from those of the base model that are known."""
    for of, found in scores.every.items():
        before = base.every.get(of, NOT_EVALUATED)
        for name, values in found.measures.items():
            console.print(f"{named(of, title_of(name))} {estimate(values)} ({counted(name, len(values))})")
            if len(first := before.measures.get(name, [])) == len(values):
                change = paired_change(first, values)
                console.print(f"change from the base model: {change.text('+')}")
        if found.empty:
            console.print(f"{named(of, 'empty outputs')} {sum(found.empty)} of {len(found.empty)}")
        if found.choices:
            balanced = f"{named(of, BALANCED)} {found.means[BALANCED]:.4f}"
            console.print(f"{balanced}, most frequent choice {frequent(found.choices)}")
            if before.choices:
                console.print(f"McNemar's exact test against the base model: {tested(before, found)}")
            print_confusion(found.choices, of)


def print_gains(found: Sequence[Gain]) -> None:
    """Print a table with a row a client: the loss of the base model and of the tuned one on the client's own rows."""
    if not found:
        return
    names = [name for name in dict.fromkeys(name for one in found for name in one.change) if name != "loss"]
    scored = bool(found[0].before)
    table = Table(title="each client's own held-out rows, which it did not train on")
    for name in ("client", "rows", *(("loss before", "after") if scored else ()), "change", "", *map(title_of, names)):
        table.add_column(name, justify="left" if name in ("client", "") else "right")
    shown, half = list(found), MOST_CLIENTS // 2
    if len(found) > MOST_CLIENTS:
        shown.sort(key=lambda one: one.change["loss"].mean)
        shown = [*shown[:half], *shown[-half:]]
    for number, one in enumerate(shown):
        if number == half and len(found) > len(shown):
            table.add_row(Text("…"))
        loss = [f"{means['loss']:.4f}" for means in (one.before, one.after)] if scored else []
        others = [one.change[name].text("+") if name in one.change else "" for name in names]
        table.add_row(Text(one.client), f"{one.rows:,}", *loss, one.change["loss"].text("+"), one.verdict, *others)
    console.print(table)
    verdicts = Counter(one.verdict for one in found)
    counts = ", ".join(f"{verdicts[word]:,} {word}" for word in ("gained", "lost", "unclear") if verdicts[word])
    console.print(
        f"{counts} of {len(found):,} clients (unclear: within two standard errors); over all rows the loss changed by "
        f"{gain_of_all(found):+.4f}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def show_result(result: "Result", as_json: bool) -> None:
    """Print the result of a run as tables, or as one JSON document."""
    if as_json:
        print_json(result_table(result))
    else:
        print_result(result)


def result_table(result: "Result") -> dict[str, Any]:
    """The results of a run as a table of plain values, for JSON."""
    return {
        "sets": sets_table(result.before, result.after),
        "clients": gains_table(result.gains),
        "rounds": len(result.reports),
        "bytes_down": max((report["bytes_down"] for report in result.reports), default=0),
        "bytes_up": max((report["bytes_up"] for report in result.reports), default=0),
        "bytes_total": sum(report["bytes_total"] for report in result.reports),
        "peak_memory": result.peak_memory,
        "step_seconds": result.step_seconds,
        "sync_seconds": result.sync_seconds,
        "weights": result.weights,
        "lora": result.lora,
        "digest": result.digest,
        "output": None if result.output is None else str(result.output),
        "best": result.best,
        "stopped": result.stopped,
        "diverged": result.diverged,
    }


def sets_table(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """The means and paired changes of each held-out set as a table of plain values, for JSON."""
    from ..recipe.schema import HELD_OUT  # not at the top, see `counted`

    sets = {}
    for of, now in after.every.items() if after.losses else ():
        then = before.every.get(of, NOT_EVALUATED)
        changes = {
            name: paired_change(values, now.measures[name])
            for name, values in then.measures.items()
            if len(now.measures.get(name, ())) == len(values)
        }
        sets[of or HELD_OUT] = {
            "examples": len(now.losses),
            "before": replace(then, sets={}).means,
            "after": replace(now, sets={}).means,
            "change": {name: asdict(change) for name, change in changes.items()},
        }
    return sets


def rounds_table(
    reports: Iterable[Mapping[str, Any]],
    evaluations: Mapping[int, Mapping[str, Any]],
    best: int | None = None,
    stopped: str | None = None,
) -> dict[str, Any]:
    """The rounds of a run as a table of plain values, for JSON: number of rounds done -> report and evaluation."""
    known = {report["round"] + 1: report for report in reports}
    means = {done: Evaluation.of(found).means for done, found in evaluations.items()}
    rounds = [
        {"done": done, "report": known.get(done), "evaluation": means.get(done)}
        for done in sorted(known.keys() | means.keys())
    ]
    return {"rounds": rounds, "best": best, "stopped": stopped}


def tested(before: Evaluation, after: Evaluation) -> str:
    """McNemar's test of the choices of two models in words."""
    test = McNemar.of(before.scores["choice"], after.scores["choice"])
    return f"{test.gained} gained, {test.lost} lost, p = {test.p:.2g}"


def frequent(choices: Sequence[Choice]) -> str:
    """The most frequent choice with its share."""
    label, share = most_frequent(choices)
    return f"{_label(label)}: {share:.0%}"


def _print_answers(before: Sequence[Answer], after: Sequence[Answer]) -> None:
    """Print answers of the base model and of the tuned one to the same requests."""
    if not before or not after:
        return
    table = Table("request", "right answer", "before", "after", show_lines=True)
    for (request, right, then), (_, _, now) in zip(before, after, strict=True):
        table.add_row(*(Text(cut(text.strip()) or "(nothing)") for text in (request, right, then, now)))
    console.print(table)


def cut(text: str, most: int = 240) -> str:
    """A text, or its beginning if it is long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _print_choice(best: int | None, stopped: str | None) -> None:
    """Print which round's model is the tuned one, where a choice was made or the run diverged; see `Result`."""
    if stopped is not None:
        console.print(stopped, highlight=False, soft_wrap=True)
    if best is not None:
        none = "the tuned model is the base model: no round that was evaluated was better"
        console.print(f"the tuned model is that after {best} rounds" if best else none, highlight=False)


def print_confusion(choices: Sequence[Choice], of: str = "") -> None:
    """Print how often each true response got each choice on a set, if there are few enough different ones."""
    found = Confusion.of(choices)
    if found is None:
        return
    table = Table("true response", title=Text(named(of, "choices of the model (columns)")))
    for label in found.labels:
        table.add_column(Text(_label(label)), justify="right")
    for label, counts in zip(found.labels, found.counts, strict=True):
        table.add_row(Text(_label(label)), *map(str, counts))
    console.print(table)


def _label(text: str) -> str:
    """A response in one line of at most 24 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 24 else f"{line[:23]}…"


def _tuned(result: "Result") -> str:
    return "tuned without a model" if result.weights is None else f"{result.weights:,} weights tuned"


def short(number: float) -> str:
    """A number as three digits and a letter: 17,748 is 17.7 k, 134,515,008 is 135 M."""
    for letter in ("", " k", " M", " G"):
        if abs(number) < 999.5 or letter == " G":
            break
        number /= 1000
    return f"{number:.3g}{letter}"
