"""The time that a run still needs."""

import time

import pytest

from fedkseed.run.progress import ROUNDS, RoundPace


@pytest.fixture
def clock(monkeypatch):
    """A function that lets time pass."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def pass_(seconds: float) -> None:
        now[0] += seconds

    return pass_


def test_the_first_round_counts_by_itself_and_the_others_with_all_between(clock):
    pace = RoundPace()
    assert (pace.seconds, pace.end(5)) == (None, None)
    clock(100)  # an evaluation of the base model, and the round
    pace.round_done(4.0)
    assert (pace.seconds, pace.since, pace.end(5)) == (4.0, 1100.0, 1120.0)
    clock(8)  # a round and an evaluation
    pace.round_done(5.0)
    assert (pace.seconds, pace.end(4)) == (6.0, 1108.0 + 24)
    clock(100)
    assert pace.end(4) == 1108.0 + 24  # it comes nearer
    assert pace.end(0) == 1108.0


def test_old_rounds_are_forgotten(clock):
    pace = RoundPace()
    pace.round_done(1000.0)
    for _ in range(ROUNDS):
        clock(3)
        pace.round_done(1.0)
    assert pace.seconds == 3
