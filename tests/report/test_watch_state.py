"""The state of a run, seen from beside it."""

import json
import os

import pytest

from fedkseed.errors import FedKSeedError
from fedkseed.report.watch_state import RunView, Watched, duration, remaining
from fedkseed.run.activity import FILE, Activity, ActivityFile
from fedkseed.run.progress import Silent
from fedkseed.run.store import Store

from .conftest import contents_kept, trains, wait_until


def test_a_run_is_not_begun_then_running_then_ended(begin, tmp_path):
    watched = Watched(tmp_path / "run")
    before = watched.look()
    assert (before.state, before.planned, before.moment) == ("not begun", 0, None)
    run = begin()
    run.halt(lambda run: trains(run, 2), "a client trains for the third round")
    with contents_kept(run.directory):
        view = watched.look()
    assert (view.state, view.text, view.done, view.planned) == ("running", "running", 2, 4)
    assert view.about.startswith("fedkseed tunes ")
    assert view.sent == sum(report["bytes_total"] for report in Store(run.directory, looks=True).reports())
    assert sorted(view.means) == [0, 2]
    assert view.moment is not None
    (training,), others = view.moment.clients["training"], view.moment.clients
    assert sum(map(len, others.values())) == 2  # the cohort
    assert view.moment.activity.startswith(f"client {training} (")
    assert view.moment.total == 20  # local steps
    assert view.left is not None and view.left >= 0  # noqa: PT018
    run.end()
    after = watched.look()
    assert (after.state, after.text, after.done, after.moment, after.left) == ("ended", "ended", 4, None, None)
    assert sorted(after.means) == [0, 2, 4]
    assert not (run.directory / FILE).exists()


def test_a_run_that_was_killed_has_stopped_and_names_the_command_that_goes_on(begin, tmp_path):
    run = begin()
    run.halt(lambda run: trains(run, 1), "a client trains for the second round")
    run.process.kill()
    run.process.join()
    wait_until(lambda: Watched(run.directory).look().state != "running", "the lock is free")
    view = Watched(run.directory).look()
    assert (view.state, view.done) == ("stopped", 1)
    assert view.text == f"stopped; it goes on with: fedkseed resume {run.directory}"
    assert view.moment is not None and "training" in view.moment.clients  # noqa: PT018


def test_a_run_that_was_refused_says_why(copy):
    Store(copy).rollback(1)
    assert Watched(copy).look().state == "stopped"
    with pytest.raises(FedKSeedError), ActivityFile(Silent()).shown_in(copy):
        raise FedKSeedError("the disk is full")
    assert Watched(copy).look().text.startswith("stopped: the disk is full; it goes on with")


def test_an_ended_run_is_not_read_again_and_a_rollback_is_seen(copy, monkeypatch):
    watched, read = Watched(copy), []
    reports = Store.reports
    monkeypatch.setattr(Store, "reports", lambda self: read.append(1) or reports(self))
    with contents_kept(copy):
        assert [watched.look().done for _ in range(3)] == [4, 4, 4]
    assert len(read) == 1
    Store(copy).rollback(1)
    view = watched.look()
    assert (view.state, view.done, sorted(view.means)) == ("stopped", 1, [0])


def test_a_store_that_cannot_be_read_now_leaves_the_last_view(copy):
    watched = Watched(copy)
    watched.look()
    database = (copy / "run.sqlite").read_bytes()
    (copy / "run.sqlite").write_bytes(database[:5000])
    view = watched.look()
    assert (view.done, view.state) == (4, "ended")
    assert "it can't be read at this moment" in view.text
    (copy / "run.sqlite").write_bytes(database)
    assert watched.look().text == "ended"


def test_a_file_of_the_present_activity_that_is_broken_is_as_none(copy):
    (copy / FILE).write_text('{"activity": ')
    assert Watched(copy).look().state == "ended"


def test_a_link_in_the_place_of_the_activity_is_replaced_and_not_followed(copy, tmp_path):
    (tmp_path / "other").write_text("mine")
    (copy / FILE).symlink_to(tmp_path / "other")
    with ActivityFile(Silent()).shown_in(copy):
        assert json.loads((copy / FILE).read_text())["error"] == ""
        assert not (copy / FILE).is_symlink()
    assert (tmp_path / "other").read_text() == "mine"
    assert os.listdir(copy).count(FILE) == 0


@pytest.mark.parametrize(
    ("moment", "left"),
    [
        (Activity(since=100.0, pace=10.0), 6 * 10 - 4),  # 4 s of the present round are over
        (Activity(since=100.0), 6 * 7 - 4),  # the mean of the rounds that were done before
        (Activity(since=0.0, pace=10.0), 0),  # a round that takes much longer
        (None, None),
    ],
)
def test_the_time_left_is_that_of_the_rounds_left(moment, left):
    view = RunView("run", planned=10, done=4, reports=[{"seconds": 6.0}, {"seconds": 8.0}])
    assert remaining(view, moment, 104.0) == left


def test_the_first_round_is_judged_by_the_clients_that_have_answered():
    view = RunView("run", planned=10, done=0)
    assert remaining(view, Activity(since=100.0, clients={"training": [1]}), 104.0) is None
    moment = Activity(since=100.0, clients={"training": [1], "waiting": [2, 3], "answered": [4]})
    assert remaining(view, moment, 104.0) == 4 * 4 * 10 - 4  # a quarter of the round took 4 s


def test_no_time_is_left_after_the_last_round():
    assert remaining(RunView("run", planned=4, done=4), Activity(since=0.0, pace=10.0), 1.0) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (18_420, "5 h 7 min")]
)
def test_durations_in_words(seconds, text):
    assert duration(seconds) == text
