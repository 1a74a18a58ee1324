"""The table of a run's rounds: for the terminal, for the screen of `fedkseed watch`, and for JSON."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from rich.table import Table

from ..evaluation.statistics import title_of
from ..run.round_metrics import telling
from .results import print_tuned_round
from .terminal import console
from .watch_state import RunView

Columns: TypeAlias = list[tuple[str, Mapping[int, str]]]  # title, and the cells by the number of rounds done


def metric_columns(view: RunView) -> Columns:
    """A table of the rounds' reports: clients, losses, bytes, …"""
    return [
        (metric.title, {report["round"] + 1: metric.text(report) for report in view.reports})
        for metric in telling(view.reports)
    ]


def score_columns(view: RunView) -> Columns:
    """The means of evaluations; those of 0 rounds are the base model's."""
    names = dict.fromkeys(name for means in view.means.values() for name in means)
    return [
        (title_of(name), {done: f"{means[name]:.4f}" for done, means in view.means.items() if name in means})
        for name in names
    ]


def numbers(view: RunView) -> list[int]:
    """The rows: numbers of rounds done that have a report or an evaluation."""
    return sorted({*(report["round"] + 1 for report in view.reports), *view.means})


def print_rounds(view: RunView) -> None:
    """Print a table with one row a round; where there are evaluations, round 0 is the base model."""
    columns = [*metric_columns(view), *score_columns(view)]
    rows = [[str(done), *(cells.get(done, "") for _, cells in columns)] for done in numbers(view)]
    titles = ["round", *(title for title, _ in columns)]
    # A title may be broken between words, a number must not be cut.
    widths = [max(map(len, [*title.split(), *cells])) for title, *cells in zip(titles, *rows, strict=True)]
    padded = sum(widths) + 3 * len(widths) + 1 <= console.width
    table = Table(padding=(0, int(padded)))
    for title, width in zip(titles, widths, strict=True):
        table.add_column(title, justify="right", min_width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table, width=max(console.width, sum(widths) + len(widths) + 1), crop=False, soft_wrap=True)
    print_tuned_round(view.best, view.stopped)


def rounds_table(view: RunView) -> dict[str, Any]:
    """Report and evaluation of each round, for JSON."""
    reports = {report["round"] + 1: report for report in view.reports}
    rounds = [{"done": done, "report": reports.get(done), "evaluation": view.means.get(done)} for done in numbers(view)]
    return {"rounds": rounds, "best": view.best, "stopped": view.stopped}
