"""Results of finished runs, and tables of them: Markdown for people, CSV for programs."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from ..evaluation.statistics import BALANCED, Evaluation, title_of
from ..files import write_atomically
from ..run.round_metrics import METRICS, values
from ..run.store import Store

# Facts of a run's store: the bytes of a client like the run's, and the commits of the code; see records.note_memory
MEMORY, COMMITS = "client_memory", "commits"

Cell: TypeAlias = "str | int | float | Spread | None"


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds and its standard deviation (with n − 1), as the paper's tables print."""

    mean: float
    std: float | None  # None for a single seed
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(fmean(values), None, len(values))
        finite = all(isfinite(value) for value in values)  # a run that diverged has none, which stdev can't take
        return cls(fmean(values), stdev(values) if finite else nan, len(values))

    @property
    def error(self) -> float | None:
        """The mean's standard error."""
        return None if self.std is None else self.std / self.count**0.5

    def __str__(self) -> str:
        digits = 2 if abs(self.mean) >= 10 else 4
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.{digits}f}")


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The results of one finished run. Dictionaries are by the number of finished rounds."""

    axes: dict[str, Any]
    seed: int
    loss: dict[int, float]  # mean over the held-out examples, nats a response token
    rouge: dict[int, float]  # mean Rouge-L F1 in percent; only where answers were generated
    bytes_down: int  # to a client in a round, the most
    bytes_up: int
    clock: dict[int, float]  # seconds of all rounds so far, without evaluations
    virtual: dict[int, float]  # virtual time, see run/cohort.py
    memory: int | None  # bytes, of a client in a process of its own; None: not measured
    directory: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)  # name -> round -> value, if measured
    scores: dict[str, dict[int, float]] = field(default_factory=dict)  # [evaluation] metric -> round -> mean
    commits: list[str | None] | None = None  # of the code that worked on it; None: not noted
    digests: dict[str, str] | None = None  # of directions, model and data
    probabilities: list[float] | None = None  # of FedKSeed-Pro's directions at the end; see records.with_probabilities
    never_drawn: int | None = None  # directions

    @classmethod
    def read(cls, directory: Path, axes: Mapping[str, Any], seed: int) -> "RunOutcome":
        store = Store(directory)
        means = {done: Evaluation.of(found).means for done, found in store.evaluations().items()}
        rounds = [values(report) for report in store.reports()]
        metrics = {
            metric.name: {done: r[metric.name] for done, r in enumerate(rounds, 1) if metric.name in r}
            for metric in METRICS
        }
        return cls(
            axes=dict(axes),
            seed=seed,
            loss={done: found["loss"] for done, found in means.items()},
            rouge={done: 100 * found["rouge"] for done, found in means.items() if "rouge" in found},
            bytes_down=int(max(metrics["bytes/down a client"].values())),
            bytes_up=int(max(metrics["bytes/up a client"].values())),
            virtual={0: 0.0} | {done: r.get("virtual time", 0.0) for done, r in enumerate(rounds, 1)},
            clock={done: sum(map(_seconds, rounds[:done])) for done in range(len(rounds) + 1)},
            memory=store.recall(MEMORY),
            directory=directory,
            commits=store.recall(COMMITS),
            digests=store.recall("identity"),
            metrics=metrics,
            scores={
                name: {done: found[name] for done, found in means.items() if name in found}
                for name in dict.fromkeys(name for found in means.values() for name in found)
            },
        )

    @property
    def rounds(self) -> int:
        return max(self.loss)

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return self.clock[self.rounds]

    def change(self, done: int) -> float:
        """Change of the held-out loss from the base model, at the last evaluation within `done` rounds."""
        return self.loss[max(d for d in self.loss if d <= done)] - self.loss[0]

    def within(self, seconds: float) -> int:
        """Number of rounds before the last evaluation within `seconds`; 0 is the base model."""
        return max(done for done in self.loss if self.clock[done] <= seconds)

    def reached(self, change: float) -> float | None:
        """Seconds until the change of the held-out loss first was `change` or below; None if it never was.

        Between two evaluations the loss is taken to be a straight line.
        """
        before = 0
        for done in sorted(self.loss):
            if (now := self.change(done)) <= change:
                then = self.change(before)
                part = 1.0 if then <= now else (then - change) / (then - now)
                return self.clock[before] + part * (self.clock[done] - self.clock[before])
            before = done
        return None


def _seconds(metrics: Mapping[str, float]) -> float:
    """Processor seconds of a round, which other programs on the machine do not lengthen; else wall-clock seconds."""
    return metrics.get("processor seconds of a round") or metrics["seconds of a round"]


# Measures of a run: name -> (title, function to the run's value after some rounds, or None if that was not measured).
Measure: TypeAlias = Callable[[RunOutcome, int], float | None]
MEASURES: dict[str, tuple[str, Measure]] = {
    "loss": ("held-out loss (nats a token)", lambda o, done: o.loss.get(done)),
    "change": (
        "change of held-out loss (nats a token)",
        lambda o, done: o.loss[done] - o.loss[0] if done in o.loss else None,
    ),
    "rouge": ("Rouge-L (%)", lambda o, done: o.rouge.get(done)),
    "rouge change": (
        "change of Rouge-L (points)",
        lambda o, done: o.rouge[done] - o.rouge[0] if done in o.rouge else None,
    ),
}


def _percent(outcome: RunOutcome, done: int, name: str) -> float | None:
    """The mean of a metric in percent."""
    found = outcome.scores.get(name, {})
    return 100 * found[done] if done in found else None


def _points(outcome: RunOutcome, done: int, name: str) -> float | None:
    """Percent points that the mean of a metric is above the base model's."""
    found = outcome.scores.get(name, {})
    return 100 * (found[done] - found[0]) if done in found else None


SHARES = ("accuracy", "exact match", "choice", BALANCED)
MEASURES |= {name: (f"{title_of(name)} (%)", partial(_percent, name=name)) for name in SHARES}
MEASURES |= {f"{n} change": (f"change of {title_of(n)} (points)", partial(_points, name=n)) for n in SHARES}


def spread(outcomes: Iterable[RunOutcome], measure: str, done: int | None = None) -> Spread | None:
    """A measure over seeds after some rounds, by default the last; None if a run lacks the measure."""
    of = MEASURES[measure][1]
    values = [of(o, o.rounds if done is None else done) for o in outcomes]
    known = [value for value in values if value is not None]
    return Spread.of(known) if values and len(known) == len(values) else None


def group(outcomes: Iterable[RunOutcome], axes: Iterable[str]) -> dict[tuple[Any, ...], list[RunOutcome]]:
    """Outcomes grouped by their values on some axes, in the order in which they come."""
    chosen = tuple(axes)
    groups: dict[tuple[Any, ...], list[RunOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(tuple(outcome.axes[axis] for axis in chosen), []).append(outcome)
    return groups


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table with rows of named cells; the cell of a column that a row lacks is empty."""

    rows: list[dict[str, Cell]]
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def markdown(self, title: str) -> str:
        lines = [" | ".join(self.columns), " | ".join("---" for _ in self.columns)]
        lines += [" | ".join(_shown(row.get(column)) for column in self.columns) for row in self.rows]
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"# {title}\n\n" + "".join(f"| {line} |\n" for line in lines) + notes

    def csv(self) -> str:
        """The table as CSV: means and standard deviations in columns of their own, numbers not rounded."""
        flat = [_flat(row) for row in self.rows]
        columns = list(dict.fromkeys(column for row in flat for column in row))
        text = StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return text.getvalue()

    def write(self, folder: Path, title: str, stem: str = "table") -> None:
        write_atomically(folder / f"{stem}.md", self.markdown(title).encode(), 0o666)
        write_atomically(folder / f"{stem}.csv", self.csv().encode(), 0o666)


def _flat(row: Mapping[str, Cell]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for column, cell in row.items():
        if isinstance(cell, Spread):
            flat |= {f"{column}, mean": cell.mean, f"{column}, std": cell.std, f"{column}, n": cell.count}
        else:
            flat[column] = cell
    return flat


def _shown(cell: Cell) -> str:
    match cell:
        case None:
            return "–"
        case str() | Spread():
            return str(cell).replace("|", "\\|")
        case int():
            return f"{cell:,}"
        case _:
            return f"{cell:,.0f}" if abs(cell) >= 10_000 else f"{cell:.4g}"
