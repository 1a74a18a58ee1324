"""Bars of a run: lines where there is no terminal, and the time that is left."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from fedkseed.report import bars as display
from fedkseed.report.bars import Bars
from fedkseed.round import Report

ROUND = Report(0, (1, 2), 4312, 4310, 17_248, 2.9739, 0, 1.23, seconds=60.0)


def test_without_a_terminal_each_round_and_note_is_one_line_however_long(monkeypatch):
    log = StringIO()
    monkeypatch.setattr(display, "console", Console(file=log, width=40, markup=False))
    with Bars(3) as bars:
        bars.note("a note that is longer than forty characters, as many of them are")
        bars.begin("client 1 (1 of 2)", 3)
        bars.advance(3, 2.5)
        bars.round_done(ROUND)
    assert log.getvalue().splitlines()[:2] == [
        "a note that is longer than forty characters, as many of them are",
        "round   1 of 3   clients 2   local loss 2.9739   mean |rho| 1.23   bytes a client: 4,312 down, 4,310 up",
    ]


def test_each_bar_shows_the_time_left_also_for_rounds_of_minutes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(display.time, "time", lambda: now[0])
    bars = Bars(10)

    def left() -> list[str]:
        return [str(display.TimeLeft().render(bars.bars.tasks[k])) for k in (0, 1)]

    bars.begin("client 1 (1 of 2)", 20)
    assert left() == ["-:--:--", "-:--:--"]
    now[0] += 5
    bars.advance(2)
    assert left() == ["-:--:--", "0:00:45"]
    now[0] += 15
    assert left()[1] == "0:00:30"  # counts down between two steps
    now[0] += 40
    bars.round_done(ROUND)
    assert left()[0] == "0:09:00"
    now[0] += 120  # a round of a minute and an evaluation
    bars.round_done(replace(ROUND, round=1))
    assert left()[0] == "0:12:00"
    now[0] += 10_000
    assert left()[0] == "0:00:00"
