"""Means with their standard errors, the scores of a model, and statistics of the answers that it chooses."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb, inf, isfinite, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error, which is infinite where there is one value, and is then not shown."""

    mean: float
    error: float

    def text(self, sign: str = "", digits: int = 4) -> str:
        """Mean ± error; with the sign `+` for a change."""
        return f"{self.mean:{sign}.{digits}f}" + (f" ± {self.error:.{digits}f}" if self.error != inf else "")

    __str__ = text

    @property
    def sign(self) -> int:
        """1 or −1 of a mean that is more than two standard errors from 0; 0 of others, of NaN, and without an error."""
        return 0 if not abs(self.mean) > 2 * self.error else 1 if self.mean > 0 else -1


ChosenText: TypeAlias = Sequence[str]  # two texts: the true response, the chosen one

TITLES = {"loss": "held-out loss", "rouge": "Rouge-L", "accuracy": "token accuracy", "choice": "choice accuracy"}
BALANCED, FREQUENT = "balanced choice accuracy", "share of the most frequent choice"
MOST_CLASSES = 8  # labels of a confusion matrix that is shown
SHOWN = 3  # answers that are kept, for people to read


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one model on held-out examples, which are the same and in the same order for every model."""

    losses: list[float]  # nats a response token, one an example
    rouge: list[float] = field(default_factory=list)  # Rouge-L F1, one a generated example
    empty: list[bool] = field(default_factory=list)  # whether the output was blank
    scores: dict[str, list[float]] = field(default_factory=dict)  # other metrics: name -> one number an example
    choices: list[Any] = field(default_factory=list)  # for the metric `choice`: a `ChosenText` an example
    sets: dict[str, "Evaluation"] = field(default_factory=dict)  # the other held-out sets, whose own `sets` is empty
    answers: list[Any] = field(default_factory=list)  # the first SHOWN written: instruction, true response, response
    owners: list[str] = field(default_factory=list)  # the client of each example, where a set has the clients' own rows

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Evaluation":
        """The scores of a table, as `dataclasses.asdict` makes it; earlier releases left fields out."""
        return cls(**{**table, "sets": {name: cls(**scores) for name, scores in table.get("sets", {}).items()}})

    @property
    def every(self) -> dict[str, "Evaluation"]:
        """The evaluations of all sets by name; the set that is always there has an empty name."""
        return {"": self, **self.sets}

    @property
    def measures(self) -> dict[str, list[float]]:
        """All that was measured, loss and Rouge-L too: name -> one number an example."""
        measures = {"loss": self.losses, "rouge": self.rouge, **self.scores}
        return {name: values for name, values in measures.items() if values}

    @property
    def means(self) -> dict[str, float]:
        """The mean of each measure; of choices also two numbers that show whether a model says the same to all.

        Those of the other sets have names as `SET: loss`.
        """
        means = {name: fmean(values) for name, values in self.measures.items()}
        if self.choices:
            means[BALANCED], means[FREQUENT] = balanced_accuracy(self.choices), most_frequent(self.choices)[1]
        for set_name, evaluation in self.sets.items():
            means |= {named(set_name, name): mean for name, mean in evaluation.means.items()}
        return means

    def changes(self, before: "Evaluation") -> dict[str, Estimate]:
        """The paired changes of those metrics that another model has on the same examples."""
        return {
            name: paired_change(values, self.measures[name])
            for name, values in before.measures.items()
            if len(self.measures.get(name, ())) == len(values)
        }


def require_finite(evaluation: Evaluation, model: str, dtype: str, kind: str = "held-out rows") -> None:
    """Refuse scores of a model that has no finite loss on some rows: no mean says anything of the others.

    Raises:
        FedKSeedError: the number of such rows, of one set, and the first of them.
    """
    for name, scores in evaluation.every.items():
        faulty = [k for k, loss in enumerate(scores.losses) if not isfinite(loss)]
        if not faulty:
            continue
        rows = f"{len(faulty)} of {len(scores.losses)} {kind}" + f" of {name}" * bool(name)
        advice = "look at the model's weights, and at these rows; `fedkseed preview` shows what is counted of a row"
        if dtype == "float16":
            advice = "float16 ends at 65,504, which activations pass: set [model] dtype = 'bfloat16', or 'float32'"
        raise FedKSeedError(
            f"{model} has no finite loss on {rows} (row {faulty[0] + 1}: {scores.losses[faulty[0]]}): {advice}"
        )


NOT_EVALUATED = Evaluation([])  # the result of a party without held-out data


def named(set_name: str, metric: str) -> str:
    """The name of a metric, or its title, on a set; the set that is always there adds nothing."""
    return f"{set_name}: {metric}" if set_name else metric


def title_of(name: str) -> str:
    """A metric's name for people; a function in a file is called by the file's name without its folder."""
    set_name, colon, metric = name.partition(": ")
    if colon and "/" not in set_name:  # a set's name has no slash, the absolute path of a function's file has one
        return named(set_name, title_of(metric))
    place, _, member = name.rpartition(":")
    return TITLES.get(name) or (f"{Path(place).name}:{member}" if place.endswith(".py") else name)


def counted(name: str, count: int) -> str:
    """The number of values of a metric, with its noun."""
    from ..recipe.schema import PREDICTED  # not at the top: `fedkseed --help` reads this module, and loads no pydantic

    return f"{count:,} {'examples' if name in PREDICTED else 'answers'}"


def estimate(values: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """Mean and standard error; the error of fewer than two values is infinite."""
    array = np.asarray(values, float)
    return Estimate(float(array.mean()), float(array.std(ddof=1)) / sqrt(array.size) if array.size > 1 else inf)


def paired_change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Mean change on the same examples and its standard error: far tighter than two separate means."""
    return estimate(np.asarray(after, float) - np.asarray(before, float))


@dataclass(frozen=True, slots=True)
class Gain:
    """The change that a tuned model brings to one client, on rows of its own that it does not train on."""

    client: str
    rows: int
    before: dict[str, float]  # the mean of each metric with the base model; empty where a client keeps that to itself
    after: dict[str, float]  # with the tuned one
    change: dict[str, Estimate]  # paired, by metric

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Gain":
        """The gain of a table, as `dataclasses.asdict` makes it."""
        return cls(**{**table, "change": {name: Estimate(**change) for name, change in table["change"].items()}})

    @property
    def verdict(self) -> str:
        """The change of the loss in a word: gained, lost, or unclear, where it is within two standard errors.

        It is unclear, too, where no error is known.
        """
        return {-1: "gained", 0: "unclear", 1: "lost"}[self.change["loss"].sign]


def gains(before: Evaluation, after: Evaluation) -> list[Gain]:
    """The gain of each client, in the order of their names; none where no set has the clients' own rows.

    Args:
        before, after: evaluations of the same examples.
    """
    for name, now in after.sets.items():
        then = before.sets.get(name, NOT_EVALUATED)
        if now.owners and then.owners == now.owners:
            return [gain(owner, then, now) for owner in sorted(set(now.owners), key=natural)]
    return []


def natural(name: str) -> list[tuple[int, str]]:
    """A key for sorting by which `client 2` comes before `client 10`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def gain(owner: str, before: Evaluation, after: Evaluation) -> Gain:
    """The gain of one client, from evaluations of a set whose `owners` name it."""

    def of_owner(values: Sequence[float]) -> list[float]:  # answers are written to the first examples alone
        return [value for value, name in zip(values, after.owners, strict=False) if name == owner]

    pairs = {name: (of_owner(values), of_owner(after.measures[name])) for name, values in before.measures.items()}
    pairs = {name: pair for name, pair in pairs.items() if pair[0]}
    base, tuned = ({name: fmean(pair[k]) for name, pair in pairs.items()} for k in range(2))
    change = {name: paired_change(then, now) for name, (then, now) in pairs.items()}
    return Gain(owner, after.owners.count(owner), base, tuned, change)


def gains_table(gains: Sequence[Gain]) -> list[dict[str, Any]]:
    """The gain of each client as a table of plain values."""
    return [asdict(gain) | {"verdict": gain.verdict} for gain in gains]


def gain_of_all(gains: Sequence[Gain]) -> float:
    """The mean change of the loss over all rows of all clients: a client counts by its rows."""
    return sum(gain.rows * gain.change["loss"].mean for gain in gains) / sum(gain.rows for gain in gains)


@dataclass(frozen=True, slots=True)
class Confusion:
    """Counts of choices: `counts[i][j]` examples with the true response `labels[i]` got the choice `labels[j]`."""

    labels: list[str]  # true or chosen, sorted
    counts: list[list[int]]

    @classmethod
    def of(cls, choices: Sequence[ChosenText]) -> "Confusion | None":
        """The counts of some choices; None with more than MOST_CLASSES labels, or none."""
        pairs = Counter((true, chosen) for true, chosen in choices)
        labels = sorted({label for pair in pairs for label in pair})
        if not 0 < len(labels) <= MOST_CLASSES:
            return None
        return cls(labels, [[pairs[true, chosen] for chosen in labels] for true in labels])


def balanced_accuracy(choices: Sequence[ChosenText]) -> float:
    """Mean over the true responses of the share of their examples that were chosen right, which is their recall.

    A model that always chooses one of n responses has 1 / n, however frequent that response is.
    """
    counts, right = Counter(true for true, _ in choices), Counter(true for true, chosen in choices if true == chosen)
    return sum(right[label] / count for label, count in counts.items()) / len(counts)


def most_frequent(choices: Sequence[ChosenText]) -> tuple[str, float]:
    """The response that was chosen most often, and its share of all choices; the first in sorted order of several."""
    counts = Counter(chosen for _, chosen in choices)
    label = min(counts, key=lambda text: (-counts[text], text))
    return label, counts[label] / len(choices)


@dataclass(frozen=True, slots=True)
class McNemar:
    """McNemar's exact test of two models on the same examples, of which each is right or wrong."""

    gained: int  # examples that the first had wrong and the second has right
    lost: int  # the other way round

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> "McNemar":
        pairs = list(zip(before, after, strict=True))
        return cls(sum(b < a for b, a in pairs), sum(b > a for b, a in pairs))

    @property
    def p(self) -> float:
        """Probability of a difference as large or larger if each changed example was a fair coin's toss; two-sided.

        With n = gained + lost and k the smaller of them it is 2 (C(n, 0) + … + C(n, k)) / 2^n, at most 1.
        """
        n, least = self.gained + self.lost, min(self.gained, self.lost)
        return min(1.0, 2 * sum(comb(n, k) for k in range(least + 1)) / 2**n)
