"""Bars of a run: lines where there is no terminal, and the time that is left."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from fedkseed.report import bars as display
from fedkseed.report import terminal
from fedkseed.report.bars import Bars
from fedkseed.report.terminal import QUIET, USUAL, showing
from fedkseed.round import Report

ROUND = Report(0, (1, 2), 4312, 4310, 17_248, 2.9739, 0, 1.23, seconds=60.0)


@pytest.fixture
def log(monkeypatch) -> StringIO:
    """What is printed where stdout is no terminal."""
    text = StringIO()
    for module in (display, terminal):
        monkeypatch.setattr(module, "console", Console(file=text, width=40, markup=False))
    return text


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """A clock that a test moves."""
    moment = [1000.0]
    monkeypatch.setattr(display.time, "time", lambda: moment[0])
    return moment


def test_without_a_terminal_each_round_and_note_is_one_line_however_long(log, now):
    with Bars(3) as bars:
        bars.note("a note that is longer than forty characters, as many of them are")
        bars.begin("client 1 (1 of 2)", 3)
        bars.advance(3, 2.5)
        bars.round_done(ROUND)
    assert log.getvalue().splitlines() == [
        "a note that is longer than forty characters, as many of them are",
        "round   1 of 3   clients 2   local loss 2.9739   mean |rho| 1.23   bytes a client: 4,312 down, 4,310 up, "
        "about 2 min 0 s left",
    ]


def test_a_log_says_how_far_a_long_phase_is_and_little_of_short_ones(log, now):
    """Two clients of a minute and a half after an evaluation of a minute; then a thousand of a hundredth."""
    with Bars(9) as bars:
        bars.note("loading the model")
        now[0] += 28
        for what, steps, seconds in (("held-out rows", 60, 1.0), *((f"client {k}", 3, 30.0) for k in (1, 2))):
            bars.begin(what, steps)
            for _ in range(steps):
                now[0] += seconds
                bars.advance()
        assert log.getvalue().splitlines() == [
            "loading the model",
            "held-out rows: 0 of 60 steps",
            "held-out rows: 30 of 60 steps, about 30 s left",
            "held-out rows: 60 of 60 steps, about 0 s left",
            *(
                f"client 1: {k} of 3 steps, about {left} left"
                for k, left in ((1, "1 min 0 s"), (2, "30 s"), (3, "0 s"))
            ),
            *(
                f"client 2: {k} of 3 steps, about {left} left"
                for k, left in ((1, "1 min 0 s"), (2, "30 s"), (3, "0 s"))
            ),
        ]
        bars.round_done(ROUND)
        before = len(log.getvalue().splitlines())
        for k in range(1000):
            bars.begin(f"client {k}", 3)
            now[0] += 0.1
            bars.advance(3)
        assert len(log.getvalue().splitlines()) == before + 3


def test_a_quiet_command_and_a_terminal_have_no_such_lines(now, monkeypatch):
    for level, is_terminal in ((QUIET, False), (USUAL, True)):
        text = StringIO()
        monkeypatch.setattr(display, "console", Console(file=text, width=40, force_terminal=is_terminal))
        with showing(level):
            bars = Bars(3)
            bars.begin("held-out rows", 2)
            now[0] += 60
            bars.advance()
        assert not text.getvalue()


def test_each_bar_shows_the_time_left_also_for_rounds_of_minutes(now):
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
