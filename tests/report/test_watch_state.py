"""The state of a run, seen from beside it, and in lines: beside a real run, and of views in which things change."""

import json
import os
import subprocess

import pytest

from fedkseed.errors import FedKSeedError
from fedkseed.report.watch_state import RunView, Teller, Watched, remaining
from fedkseed.run.activity import FILE, Activity, ActivityFile
from fedkseed.run.progress import Silent, duration
from fedkseed.run.round_metrics import line
from fedkseed.run.store import Store

from .conftest import SECONDS, command, contents_kept, environment, trains, wait_until

REPORT = {"round": 0, "clients": [1], "loss": 2.0, "skipped": 0, "scalar": 1.0, "bytes_down": 5, "bytes_up": 6}
REPORT |= {"bytes_total": 11}


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


def test_without_a_terminal_there_is_a_line_a_round_until_the_run_has_ended(begin, tmp_path):
    asked = command("watch", tmp_path / "run")
    with subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as watching:
        begin().end()
        text, _ = watching.communicate(timeout=SECONDS)
    assert watching.returncode == 0
    lines, store = text.decode().splitlines(), Store(tmp_path / "run")
    rounds = [one.partition("   about ")[0] for one in lines if one.startswith("round ")]
    assert rounds == [f"round {done:3} of 4   {line(report)}" for done, report in enumerate(store.reports(), 1)]
    scored = [one for one in lines if one.startswith(("base model", "after"))]
    assert [one.split("   ")[0] for one in scored] == ["base model", "after 2 rounds", "after 4 rounds"]
    for one, found in zip(scored, store.evaluations().values(), strict=True):
        assert f"held-out loss {sum(found['losses']) / len(found['losses']):.4f}" in one
    assert lines[-1] == "run: ended"
    assert len(lines) == len(set(lines))


def test_a_run_that_has_ended_is_said_whole_and_at_once(finished):
    done = subprocess.run(command("watch", finished), env=environment(), capture_output=True, check=True, text=True)
    assert [text.split()[0] for text in done.stdout.splitlines()] == [
        "base", "round", "round", "after", "round", "round", "after", "finished:"
    ]  # fmt: skip


def view(done: int, state="running", **more) -> RunView:
    return RunView("run", state, more.pop("text", state), planned=9, done=done, reports=[REPORT] * done, **more)


def test_every_line_is_said_once_and_a_rollback_is_said():
    said: list[str] = []
    teller, noted = Teller(said.append), Activity(notes=[(1.0, "client 3 is late")])
    for seen in (
        view(0), view(1, moment=noted, left=80.0), view(1, moment=noted), view(2, means={2: {"loss": 1.5}}),
        view(2, means={2: {"loss": 1.5}}), view(1), view(2, means={2: {"loss": 1.75}}), view(9, "ended"),
    ):  # fmt: skip
        teller.tell(seen)
    rounds = [text.partition("   clients")[0].partition("   held-out")[0] for text in said]
    assert rounds[:8] == [
        "run: running", "client 3 is late", "round   1 of 9", "round   2 of 9", "after 2 rounds",
        "back at 1 finished rounds", "round   2 of 9", "after 2 rounds",
    ]  # fmt: skip
    assert said[2].endswith("   about 1 min 20 s left")
    assert said[7] == "after 2 rounds   held-out loss 1.7500"
    assert rounds[8:] == [f"round {done:3} of 9" for done in range(3, 10)] + ["run: ended"]


def test_what_stopped_a_run_is_said_before_it_goes_on():
    said: list[str] = []
    teller = Teller(said.append)
    states = [view(1), view(1, "stopped", text="stopped: no space"), view(1, "stopped", text="stopped: no space")]
    assert [teller.tell(seen) for seen in [*states, view(2)]] == ["running", "stopped", "stopped", "running"]
    assert [text for text in said if text.startswith("run: ")] == [
        "run: running", "run: stopped: no space", "run: running"
    ]  # fmt: skip
