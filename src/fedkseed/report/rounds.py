"""The table of a run's rounds: for the terminal, for the screen of `fedkseed watch`, and for JSON."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from rich.table import Table

from ..evaluation.statistics import title_of
from ..run.round_metrics import METRICS, telling
from .terminal import console, say
from .watch_state import RunView

ShownColumns: TypeAlias = list[tuple[str, Mapping[int, str]]]  # title, and the cells by the number of rounds done


def metric_columns(view: RunView) -> ShownColumns:
    """A table of the rounds' reports: clients, losses, bytes, …"""
    return [
        (metric.title, {report["round"] + 1: metric.text(report) for report in view.reports})
        for metric in telling(view.reports)
        if view.timed or metric.name != "virtual time"
    ]


def score_columns(view: RunView) -> ShownColumns:
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
    """Print a table with one row a round; where there are evaluations, round 0 is the base model.

    On a terminal that is too narrow, columns that the line of a round lacks are left out and named.
    """
    rounds = ("round", {done: str(done) for done in numbers(view)})
    columns = [rounds, *metric_columns(view), *score_columns(view)]
    # A title may be broken between words, a number must not be cut.
    width_of = {title: max(map(len, [*title.split(), *cells.values()])) for title, cells in columns}
    absent = list[str]()
    for spare in [metric.title for metric in reversed(METRICS) if metric.phrase == "" and metric.title in width_of]:
        if console.is_terminal and sum(width_of.values()) + len(width_of) + 1 > console.width:
            absent.append(spare)
            del width_of[spare]
    columns = [column for column in columns if column[0] in width_of]
    room = console.width - sum(width_of.values()) - len(width_of) - 1
    padded = room >= 2 * len(width_of)
    table = Table(padding=(0, int(padded)))
    for title, width in width_of.items():
        table.add_column(title, justify="right", min_width=width, width=width if room >= 0 and not padded else None)
    for done in numbers(view):
        table.add_row(*(cells.get(done, "") for _, cells in columns))
    console.print(table, crop=False, soft_wrap=True)
    if absent:
        say(f"no room here for: {', '.join(absent)}; a wider terminal has it, and --json")


def rounds_table(view: RunView) -> dict[str, Any]:
    """Report and evaluation of each round, for JSON."""
    reports = {report["round"] + 1: report for report in view.reports}
    rounds = [{"done": done, "report": reports.get(done), "evaluation": view.means.get(done)} for done in numbers(view)]
    return {"rounds": rounds, "best": view.best, "stopped": view.stopped}
