"""The table of a round's metrics, read by terminal, `fedkseed rounds`, event files, report page and result tables.

A metric's value is computed from the round's report as the store keeps it: the fields of `Report` as JSON. To add one,
append to `METRICS` before the command starts, as docs/examples/metric.py does, or in the module of an objective that a
recipe names, which runs import, but not the commands `rounds` and `report`:

    METRICS.append(Metric("seconds a client", "seconds a client", lambda r: r["seconds"] / len(r["clients"])))
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

StoredReport: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a round, with its names and formats."""

    name: str  # in event files and for scripts; a slash makes a group
    title: str  # for people
    of: Callable[
        [StoredReport], float | None
    ]  # its value; None: not measured. Runs of earlier versions may lack fields
    unit: str = ""
    form: str = "{:,.4g}"  # format of the value in tables
    always: bool = False  # shown also where it is zero or not measured
    absent: Callable[[StoredReport], str] = lambda report: "–"  # shown in place of a value that was not measured
    phrase: str | None = None  # in the terminal's line of a round; None: title and value; empty: left out

    def value(self, report: StoredReport) -> float | None:
        """The value; None if it was not measured or is not finite."""
        value = self.of(report)
        return None if value is None or not math.isfinite(value) else value

    def says(self, report: StoredReport) -> bool:
        """Whether the metric is to be shown for this round."""
        return self.always or bool(self.value(report))

    def text(self, report: StoredReport) -> str:
        """The value as the text of a table's cell."""
        value = self.value(report)
        return self.absent(report) if value is None else self.form.format(value)


METRICS = [
    Metric("clients", "clients", lambda r: len(r["clients"]), form="{}", always=True),
    Metric("loss/local", "local loss", lambda r: r["loss"], "nats a token", "{:.4f}", always=True,
           absent=lambda r: "none finite" if r["skipped"] else "not sent"),  # under masks, or noise
    Metric("size of a scalar gradient", "mean |rho|", lambda r: r["scalar"], phrase="mean |rho| {:.2f}"),
    Metric("skipped", "skipped", lambda r: r["skipped"], "steps", "{:,}",
           phrase="SKIPPED {:,} steps, loss not finite"),
    Metric("bytes/down a client", "bytes down", lambda r: r["bytes_down"], "bytes", "{:,}", always=True,
           phrase="bytes a client: {:,} down"),
    Metric("bytes/up a client", "bytes up", lambda r: r["bytes_up"], "bytes", "{:,}", always=True, phrase=", {:,} up"),
    Metric("bytes/all clients", "bytes of all", lambda r: r["bytes_total"], "bytes", "{:,}", phrase=""),
    Metric("privacy/epsilon", "epsilon spent", lambda r: r.get("epsilon"), form="{:.3g}",
           phrase="epsilon {:.3g} spent"),
    Metric("replayed", "replayed", lambda r: r.get("replayed"), "coefficients", "{:,}",
           phrase="replayed {:,} coefficients"),
    Metric("staleness", "largest staleness", lambda r: max(r.get("staleness", ()), default=None), "rounds", "{}",
           phrase="staleness up to {}"),
    Metric("given up", "given up", lambda r: r.get("given_up"), "clients", "{}", phrase="given up {} clients"),
    Metric("seconds of a round", "seconds", lambda r: r.get("seconds"), "seconds", "{:,.2f}", phrase=""),
    Metric("processor seconds of a round", "processor seconds", lambda r: r.get("cpu_seconds"), "seconds", "{:,.2f}",
           phrase=""),
    Metric("virtual time", "virtual time", lambda r: r.get("clock"), "local steps", "{:,.10g}", phrase=""),
]  # fmt: skip

# Sums over all rounds so far, for event files alone: tables show single rounds.
SUMS = [
    Metric("bytes/down", "bytes down, all clients", lambda r: r.get("total_down", 0)),
    Metric("bytes/up", "bytes up, all clients", lambda r: r["bytes_total"] - r.get("total_down", 0)),
]


def values(report: StoredReport) -> dict[str, float]:
    """The values of those metrics that were measured, by name."""
    numbers = {metric.name: metric.value(report) for metric in METRICS}
    return {name: number for name, number in numbers.items() if number is not None}


def telling(reports: Sequence[StoredReport]) -> list[Metric]:
    """The columns of a table of these rounds: metrics shown in every table, or not zero in one of the rounds."""
    return [metric for metric in METRICS if metric.always or any(map(metric.says, reports))]


def line(report: StoredReport) -> str:
    """A round's line on the terminal; a phrase that begins with a comma continues the phrase before."""
    text = ""
    for metric in METRICS:
        if metric.phrase == "" or not metric.says(report):
            continue
        value, phrase = metric.value(report), metric.phrase
        phrase = f"{metric.title} {metric.text(report)}" if phrase is None or value is None else phrase.format(value)
        text += phrase if phrase.startswith(",") or not text else f"   {phrase}"
    return text
