"""Results of finished runs, and tables of them: Markdown for people, CSV for programs."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import accumulate, chain, pairwise
from math import isfinite, nan
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from ..evaluation.statistics import BALANCED, Evaluation, named, title_of
from ..files import write_atomically
from ..recipe.algorithms import algorithm_of
from ..recipe.reading import load_recipe
from ..recipe.schema import VALIDATION, Recipe
from ..run.round_metrics import METRICS, values
from ..run.store import Store

# Facts of a run's store: the bytes of a client like the run's, and the commits of the code; see run_records.note_memory
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
        finite = all(map(isfinite, values))  # not if a run diverged, which stdev can't take
        std = None if len(values) < 2 else stdev(values) if finite else nan
        return cls(fmean(values), std, len(values))

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
    steps: dict[int, int] = field(default_factory=dict)  # of all clients so far; empty: of an older record
    once: int | None = 0  # bytes that travel once in a run, as a basis to each client; None: not known
    probabilities: list[float] | None = None  # of FedKSeed-Pro's directions at the end
    never_drawn: int | None = None  # directions

    @classmethod
    def read(cls, directory: Path, axes: Mapping[str, Any], seed: int) -> "RunOutcome":
        store, recipe = Store(directory), load_recipe(directory / "recipe.toml")
        means = {done: Evaluation.of(scores).means for done, scores in store.evaluations().items()}
        rounds = {done: values(report) for done, report in enumerate(store.reports(), 1)}
        metrics = _by_name(rounds, [metric.name for metric in METRICS])
        # of the processor, which other programs on the machine do not lengthen; else by the clock
        seconds = [r.get("processor seconds of a round") or r["seconds of a round"] for r in rounds.values()]
        return cls(
            axes=dict(axes),
            seed=seed,
            loss={done: scores["loss"] for done, scores in means.items()},
            rouge={done: 100 * scores["rouge"] for done, scores in means.items() if "rouge" in scores},
            bytes_down=int(max(metrics["bytes/down a client"].values())),
            bytes_up=int(max(metrics["bytes/up a client"].values())),
            virtual={0: 0.0} | {done: numbers.get("virtual time", 0.0) for done, numbers in rounds.items()},
            clock={done: sum(seconds[:done]) for done in range(len(rounds) + 1)},
            memory=store.recall(MEMORY),
            commits=store.recall(COMMITS),
            digests=store.recall("identity"),
            steps=_client_steps(store, recipe),
            once=_sent_once(store, recipe.directions.basis),
            directory=directory,
            metrics=metrics,
            scores=_by_name(means, dict.fromkeys(chain(*means.values()))),
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

    @property
    def searched_loss(self) -> tuple[float, float]:
        """The loss before and after by which a search compares runs: on the validation part, where there is one."""
        losses = self.scores.get(named(VALIDATION, "loss"), self.loss)
        return losses[0], losses[self.rounds]

    @property
    def last_change(self) -> float:
        return self.change(self.rounds)

    def within(self, limit: float, of: Mapping[int, float] | None = None) -> int:
        """Number of rounds before the last evaluation within a number of seconds, or a limit of another series."""
        spent = self.clock if of is None else of
        return max(done for done in self.loss if spent[done] <= limit)

    def reached(self, change: float) -> float | None:
        """Seconds until the change of loss, a straight line between evaluations, first was `change`; None if never."""
        for before, done in pairwise([0, *sorted(self.loss)]):
            then, now = self.change(before), self.change(done)
            if now <= change:
                part = 1.0 if then <= now else (then - change) / (then - now)
                return self.clock[before] + part * (self.clock[done] - self.clock[before])
        return None


def _client_steps(store: Store, recipe: Recipe) -> dict[int, int]:
    if (clients := store.recall("clients")) is None:
        return {}
    work, examples = algorithm_of(recipe.training.algorithm).work(recipe), clients["examples"]
    counts = (sum(work.count(examples[client]) for client in report["clients"]) for report in store.reports())
    return dict(enumerate(accumulate(counts, initial=0)))


def _sent_once(store: Store, basis: str | None) -> int | None:
    if basis is None:
        return 0
    return Path(basis).stat().st_size * len(store.recall("clients")["examples"]) if Path(basis).is_file() else None


def _by_name(rounds: Mapping[int, Mapping[str, float]], names: Iterable[str]) -> dict[str, dict[int, float]]:
    """Numbers of rounds by name, then by round."""
    return {name: {done: numbers[name] for done, numbers in rounds.items() if name in numbers} for name in names}


@dataclass(frozen=True, slots=True)
class Measure:
    """A number that each evaluation of a run has, or its change from that of the base model."""

    title: str
    series: Callable[[RunOutcome], Mapping[int, float]]  # the number by finished rounds; empty: not measured
    factor: int = 1  # 100 makes percent of a share
    change: bool = False

    def after(self, outcome: RunOutcome, done: int | None = None) -> float | None:
        """The measure after a number of rounds, by default the last; None if it was not taken then."""
        done = outcome.rounds if done is None else done
        return self.at(outcome, done) if done in self.series(outcome) else None

    def at(self, outcome: RunOutcome, done: int) -> float:
        """The measure after a number of rounds after which it was taken."""
        series = self.series(outcome)
        return self.factor * (series[done] - series[0] if self.change else series[done])


SHARES = ("accuracy", "exact match", "choice", BALANCED)  # metrics that are shares of examples or of tokens
MEASURES: dict[str, Measure] = {
    "loss": Measure("held-out loss (nats a token)", attrgetter("loss")),
    "change": Measure("change of held-out loss (nats a token)", attrgetter("loss"), change=True),
    "rouge": Measure("Rouge-L (%)", attrgetter("rouge")),
    "rouge change": Measure("change of Rouge-L (points)", attrgetter("rouge"), change=True),
}
for _name in SHARES:
    _share = Measure(f"{title_of(_name)} (%)", lambda outcome, name=_name: outcome.scores.get(name, {}), factor=100)
    MEASURES[_name] = _share
    MEASURES[f"{_name} change"] = replace(_share, title=f"change of {title_of(_name)} (points)", change=True)


def spread(outcomes: Iterable[RunOutcome], measure: str, done: int | None = None) -> Spread | None:
    """A measure over seeds after some rounds, by default the last; None if a run lacks the measure."""
    values = [MEASURES[measure].after(outcome, done) for outcome in outcomes]
    numbers = [value for value in values if value is not None]
    return Spread.of(numbers) if values and len(numbers) == len(values) else None


def group(outcomes: Iterable[RunOutcome], axes: Iterable[str]) -> dict[tuple[Any, ...], list[RunOutcome]]:
    """Outcomes grouped by their values on some axes, in the order in which they come."""
    axes, groups = tuple(axes), dict[tuple[Any, ...], list[RunOutcome]]()
    for outcome in outcomes:
        groups.setdefault(tuple(outcome.axes[axis] for axis in axes), []).append(outcome)
    return groups


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table with rows of named cells; the cell of a column that a row lacks is empty."""

    rows: list[dict[str, Cell]]
    notes: tuple[str, ...] = ()  # empty ones are not shown

    def markdown(self, title: str) -> str:
        columns = dict.fromkeys(chain(*self.rows))
        lines = [columns, ["---"] * len(columns)] if columns else []
        lines += [[_shown(row.get(column)) for column in columns] for row in self.rows]
        notes = "".join(f"\n{note}\n" for note in self.notes if note)
        return f"# {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + notes

    def csv(self) -> str:
        """The table as CSV: means and standard deviations in columns of their own, numbers not rounded."""
        flat: list[dict[str, Any]] = []
        for row in self.rows:
            flat.append({})
            for column, cell in row.items():
                if isinstance(cell, Spread):
                    flat[-1] |= {f"{column}, mean": cell.mean, f"{column}, std": cell.std, f"{column}, n": cell.count}
                else:
                    flat[-1][column] = cell
        return csv_of(flat)

    def write(self, folder: Path, title: str, stem: str = "table") -> None:
        write_atomically(folder / f"{stem}.md", self.markdown(title).encode(), 0o666)
        write_atomically(folder / f"{stem}.csv", self.csv().encode(), 0o666)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with the columns in the order in which they first come."""
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(chain(*rows))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _shown(cell: Cell) -> str:
    if isinstance(cell, str | Spread | None):
        return "–" if cell is None else str(cell).replace("|", "\\|")
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.0f}" if abs(cell) >= 10_000 else f"{cell:.4g}"
