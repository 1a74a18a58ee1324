"""A run on a terminal that renews itself: progress, losses, clients, rounds and notes, by the package textual."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, ProgressBar, Sparkline, Static

from ..run.progress import duration
from .rounds import metric_columns, numbers, score_columns
from .terminal import short
from .watch_state import SECONDS_BETWEEN_LOOKS, RunView, Watched

ROUNDS_SHOWN = 500  # rounds of the table, the latest first
CLIENTS_NAMED = 20  # clients of one standing that are named; of more, their number


class Screen(App[None]):
    """The terminal's screen of one run; it ends by a key alone, so that the end of a run stays to be read."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "fedkseed watch"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,escape,ctrl+c", "quit", "quit")]
    CSS = """
    #head, #progress, #now, #clients { height: auto; padding: 0 1; }
    #head { text-style: bold; }
    #progress Static { width: auto; padding-right: 2; }
    #curves { height: 4; padding: 0 1; }
    #curves Vertical { width: 1fr; padding-right: 2; }
    #curves Sparkline { height: 2; }
    DataTable { height: 1fr; }
    #notes { height: auto; max-height: 8; padding: 0 1; color: $text-muted; }
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.watched = Watched(directory)
        self._drawn: str | None = None  # the version of the store in the table

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Horizontal(id="progress"):
            yield Static(id="rounds")
            yield ProgressBar(show_percentage=False, show_eta=False)  # `RunView.left` counts evaluations too
            yield Static(id="left")
        yield Static(id="now")
        yield Static(id="clients")
        with Horizontal(id="curves"):
            for name in ("held-out", "local"):
                with Vertical():
                    yield Static(id=f"{name}-loss")
                    yield Sparkline(id=f"{name}-curve", summary_function=min)
        yield DataTable(cursor_type="none", zebra_stripes=True)
        yield Static(id="notes")
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(SECONDS_BETWEEN_LOOKS, self.renew)
        self.set_interval(SECONDS_BETWEEN_LOOKS, self.end_without_terminal)
        self.renew()

    def end_without_terminal(self) -> None:
        """End where the terminal is gone: reading from it returns at once then, again and again, on a whole core."""
        if not os.isatty(0):
            os._exit(1)  # nobody is left to be shown anything, and the thread that reads keys never ends

    @work(thread=True, exclusive=True)  # a commit may keep the store for a moment, and keys must not wait for it
    def renew(self) -> None:
        view = self.watched.look()
        self.call_from_thread(self.draw, view)

    def draw(self, view: RunView) -> None:
        """Show a view."""
        moment = view.moment
        self._say("head", f"{view.name}   {view.text}   {view.about}")
        self._say("rounds", f"{view.done} of {view.planned} rounds, {short(view.sent)}B sent" if view.planned else "")
        self._say("left", "" if view.left is None else f"about {duration(view.left)} left")
        self.query_one(ProgressBar).update(total=view.planned or None, progress=view.done)
        steps = f"{moment.done:,} of {moment.total:,}" if moment and moment.total else ""
        self._say("now", f"{moment.activity}   {steps}" if moment else "")
        groups = moment.clients.items() if moment else ()
        self._say("clients", "   ".join(f"{kind}: {_named(numbers)}" for kind, numbers in groups))
        self._say("notes", "\n".join(view.notes[-8:]))
        if view.version == self._drawn:
            return
        self._drawn = view.version
        held_out = [means["loss"] for means in view.means.values() if "loss" in means]
        local = [report["loss"] for report in view.reports if report["loss"] is not None]
        for name, values in (("held-out", held_out), ("local", local)):
            ends = f"{values[0]:.4f} to {values[-1]:.4f}" if values else "none yet"
            self._say(f"{name}-loss", f"{name} loss: {ends}")
            self.query_one(f"#{name}-curve", Sparkline).data = [value for value in values if value == value]
        table, columns = self.query_one(DataTable), [*score_columns(view), *metric_columns(view)]
        table.clear(columns=True)
        table.add_columns(*(Text(title, justify="right") for title in ("round", *(title for title, _ in columns))))
        for done in numbers(view)[: -ROUNDS_SHOWN - 1 : -1]:  # the latest round comes first, the base model last
            cells = (str(done) if done else "base", *(cells.get(done, "") for _, cells in columns))
            table.add_row(*(Text(cell, justify="right") for cell in cells))

    def _say(self, name: str, text: str) -> None:
        self.query_one(f"#{name}", Static).update(Text(text))  # texts of users may hold brackets


def _named(clients: Sequence[int]) -> str:
    return " ".join(map(str, clients)) if len(clients) <= CLIENTS_NAMED else f"{len(clients):,} clients"
