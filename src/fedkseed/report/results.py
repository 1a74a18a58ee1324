"""The results of a run and of an evaluation: tables for people, documents for JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from ..evaluation import statistics as stats
from ..recipe.schema import HELD_OUT
from .terminal import console, print_json, say

if TYPE_CHECKING:
    from ..run.loop import Result
    from .verdict import RunVerdict

CLIENTS_SHOWN = 20  # in the table of gains; of more clients, those that gained most and those that lost most
LABEL_LENGTH, ANSWER_LENGTH = 24, 240  # characters of a text that are shown


@dataclass(frozen=True, slots=True)
class SetScores:
    """The scores of two models on one held-out set."""

    set: str  # its name; empty: the set that is always there
    before: stats.Evaluation  # NOT_EVALUATED where the first model has none on this set
    after: stats.Evaluation

    def name(self, metric: str) -> str:
        """A metric's name or title, with that of the set."""
        return stats.named(self.set, metric)

    @property
    def changes(self) -> dict[str, stats.Estimate]:
        return self.after.changes(self.before)

    @property
    def test(self) -> stats.McNemar | None:
        """McNemar's test of the two models' choices; None where one of them made none."""
        if not (self.before.choices and self.after.choices):
            return None
        return stats.McNemar.of(self.before.scores["choice"], self.after.scores["choice"])


def set_by_set(before: stats.Evaluation, after: stats.Evaluation) -> list[SetScores]:
    """The scores of two models, held-out set by held-out set."""
    return [SetScores(name, before.every.get(name, stats.NOT_EVALUATED), now) for name, now in after.every.items()]


def sets_table(before: stats.Evaluation, after: stats.Evaluation) -> dict[str, Any]:
    """The means and paired changes of each held-out set, for JSON."""
    if not after.losses:
        return {}
    return {
        scores.set or HELD_OUT: {
            "examples": len(scores.after.losses),
            "before": replace(scores.before, sets={}).means,
            "after": replace(scores.after, sets={}).means,
            "change": scores.changes,
        }
        for scores in set_by_set(before, after)
    }


def show_result(result: "Result", verdict: "RunVerdict", as_json: bool) -> None:
    """Print the result of a run as tables with the verdict below, or as one JSON document."""
    if as_json:
        print_json(_result_table(result) | {"verdict": verdict})
        return
    weights = "tuned without a model" if result.weights is None else f"{result.weights:,} weights tuned"
    if result.before.losses:
        _print_measures(result, weights)
        for name, evaluation in result.after.every.items():
            print_confusion(evaluation.choices, name)
    else:
        say(f"{weights}; nothing was evaluated here")
    print_gains(result.gains)
    unchanged = result.best == 0  # the tuned model is the base model
    if result.before.answers and result.after.answers and not unchanged:
        table = Table("request", "right answer", "before", "after", show_lines=True)
        for before, after in zip(result.before.answers, result.after.answers, strict=True):
            table.add_row(*(Text(_cut(text.strip(), ANSWER_LENGTH) or "(nothing)") for text in (*before, after[2])))
        console.print(table)
    _print_costs(result)
    if result.output is not None:
        say(f"{result.output} leaves the base model as it is" if unchanged else f"the tuned model is {result.output}")
    print_verdict(verdict, result.best, result.stopped)


def _result_table(result: "Result") -> dict[str, Any]:
    """The results of a run, for JSON."""
    fields = "peak_memory step_seconds sync_seconds weights lora digest output best stopped diverged notes"
    return {
        "sets": sets_table(result.before, result.after), "clients": stats.gains_table(result.gains),
        "rounds": len(result.reports),
        "bytes_down": max((report["bytes_down"] for report in result.reports), default=0),
        "bytes_up": max((report["bytes_up"] for report in result.reports), default=0),
        "bytes_total": sum(report["bytes_total"] for report in result.reports),
        **{field: getattr(result, field) for field in fields.split()},
    }  # fmt: skip


def _print_measures(result: "Result", title: str) -> None:
    table = Table("measure", "before", "after", "change", title=title)
    for scores in set_by_set(result.before, result.after):
        both = scores.before, scores.after
        for metric, change in scores.changes.items():
            unit = " (nats a token)" if metric == "loss" else ""
            count = stats.counted(metric, len(scores.before.measures[metric]))
            means = (str(stats.estimate(each.measures[metric])) for each in both)
            table.add_row(scores.name(f"{stats.title_of(metric)}, {count}{unit}"), *means, change.text("+"))
        if scores.before.empty:
            rates = (f"{sum(each.empty) / len(each.empty):.0%}" for each in both)
            table.add_row(scores.name("empty outputs"), *rates, "")
        if scores.test is not None:
            before, after = (each.means[stats.BALANCED] for each in both)
            table.add_row(scores.name(stats.BALANCED), f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}")
            shares = (Text(_most_frequent(each.choices)) for each in both)
            table.add_row(scores.name("most frequent choice"), *shares, "")
            table.add_row(scores.name("McNemar's exact test"), "", "", _in_words(scores.test))
    console.print(table)


def _print_costs(result: "Result") -> None:
    table = Table("cost", Column("value", overflow="fold"))  # a digest must not be cut
    reports, output = result.reports, result.output
    if reports:
        down, up = max(r["bytes_down"] for r in reports), max(r["bytes_up"] for r in reports)
        table.add_row("bytes a client and round", f"{down:,} down + {up:,} up = {down + up:,}")
        for what, numbers in (("all tuned weights", result.weights), ("a LoRA of rank 8", result.lora)):
            if numbers and 8 * numbers > down + up:
                table.add_row(f"{what}, as float32 both ways", f"{8 * numbers:,}")
    if output is not None:
        size = sum(file.stat().st_size for file in (output, *output.rglob("*")) if file.is_file())
        table.add_row("the tuned model", f"{size:,} bytes")
    table.add_row("peak memory", f"{result.peak_memory / 1e9:.2f} GB")
    if result.step_seconds is not None:
        table.add_row("a local step (median)", f"{result.step_seconds:.2f} s")
    if result.sync_seconds is not None:
        table.add_row("sync to the latest model", f"{result.sync_seconds:.2g} s")
    table.add_row("digest of the tuned model", result.digest or "not known without the model")
    console.print(table)


def print_scores(evaluation: stats.Evaluation, base: stats.Evaluation) -> None:
    """Print the scores of a model on all sets, and their changes from those of the base model that are known."""
    for scores in set_by_set(base, evaluation):
        changes = scores.changes
        for metric, values in scores.after.measures.items():
            count = stats.counted(metric, len(values))
            console.print(f"{scores.name(stats.title_of(metric))} {stats.estimate(values)} ({count})")
            if metric in changes:
                console.print(f"change from the base model: {changes[metric].text('+')}")
        if blank := scores.after.empty:
            console.print(f"{scores.name('empty outputs')} {sum(blank)} of {len(blank)}")
        if choices := scores.after.choices:
            balanced = f"{scores.name(stats.BALANCED)} {scores.after.means[stats.BALANCED]:.4f}"
            console.print(f"{balanced}, most frequent choice {_most_frequent(choices)}")
            if scores.test is not None:
                console.print(f"McNemar's exact test against the base model: {_in_words(scores.test)}")
            print_confusion(choices, scores.set)


def print_gains(gains: Sequence[stats.Gain]) -> None:
    """Print a table with a row a client: the loss of the base model and of the tuned one on the client's own rows."""
    if not gains:
        return
    metrics = [name for name in dict.fromkeys(name for gain in gains for name in gain.change) if name != "loss"]
    scored = bool(gains[0].before)
    table = Table(title="each client's own held-out rows, which it did not train on")
    losses = ("loss before", "after") if scored else ()
    for name in ("client", "rows", *losses, "change", "", *map(stats.title_of, metrics)):
        table.add_column(name, justify="left" if name in ("client", "") else "right")
    rows: list[tuple[Text | str, ...]] = [
        (
            Text(gain.client),
            f"{gain.rows:,}",
            *(f"{means['loss']:.4f}" for means in (gain.before, gain.after) if scored),
            gain.change["loss"].text("+"),
            gain.verdict,
            *(gain.change[metric].text("+") if metric in gain.change else "" for metric in metrics),
        )
        for gain in (gains if len(gains) <= CLIENTS_SHOWN else sorted(gains, key=lambda gain: gain.change["loss"].mean))
    ]
    if len(gains) > CLIENTS_SHOWN:
        rows[CLIENTS_SHOWN // 2 : -CLIENTS_SHOWN // 2] = [(Text("…"),)]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    verdicts = Counter(gain.verdict for gain in gains)
    counts = ", ".join(f"{verdicts[word]:,} {word}" for word in ("gained", "lost", "unclear") if verdicts[word])
    say(
        f"{counts} of {len(gains):,} clients (unclear: within two standard errors); over all rows the loss changed by "
        f"{stats.gain_of_all(gains):+.4f}"
    )


def print_verdict(verdict: "RunVerdict", best: int | None, stopped: str | None) -> None:
    """Print the verdict on a run, after its warnings, the reason for an early end, and a choice of a round.

    A verdict of divergence says the latter two by itself.
    """
    if stopped is not None and verdict.kind != "diverged":
        say(stopped)
    if best and verdict.kind != "diverged":
        say(f"the tuned model is that after {best} rounds")
    for warning in verdict.warnings:
        say(f"warning: {warning}")
    say(verdict.text)


def print_confusion(choices: Sequence[stats.ChosenText], set_: str = "") -> None:
    """Print how often each true response got each choice on a set, if there are few enough different ones."""
    confusion = stats.Confusion.of(choices)
    if confusion is None:
        return
    table = Table("true response", title=Text(stats.named(set_, "choices of the model (columns)")))
    for label in confusion.labels:
        table.add_column(Text(_label(label)), justify="right")
    for label, counts in zip(confusion.labels, confusion.counts, strict=True):
        table.add_row(Text(_label(label)), *map(str, counts))
    console.print(table)


def _in_words(test: stats.McNemar) -> str:
    return f"{test.gained} gained, {test.lost} lost, p = {test.p:.2g}"


def _most_frequent(choices: Sequence[stats.ChosenText]) -> str:
    """The most frequent choice with its share."""
    label, share = stats.most_frequent(choices)
    return f"{_label(label)}: {share:.0%}"


def _label(text: str) -> str:
    """A response as a label in one line."""
    return _cut(" ".join(text.split()), LABEL_LENGTH)


def _cut(text: str, length: int) -> str:
    """A text, or its beginning if it is long."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
