"""The file with what a run does at this moment."""

import json
import os
import stat
from itertools import chain
from pathlib import Path

import pytest

from fedkseed.errors import FedKSeedError
from fedkseed.recipe.reading import load_recipe
from fedkseed.round import Report
from fedkseed.run import activity as now
from fedkseed.run.activity import FILE, Activity, ActivityFile, moment_of
from fedkseed.run.progress import Silent
from fedkseed.run.start_and_resume import start

from ..conftest import recipe_text

REPORT = Report(0, (1, 2), 10, 20, 60, 2.5, 0, 1.5, seconds=7.0)


class Recorder(Silent):
    """Keeps what the file says after each call, and all calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[Activity] = []
        self.calls: list[tuple] = []

    def look(self, *call) -> None:
        self.calls.append(call)
        if (moment := moment_of(self.directory)) is not None:
            self.seen.append(moment)

    def note(self, text):
        self.look("note", text)

    def begin(self, what, total):
        self.look("begin", what, total)

    def advance(self, count=1, loss=None):
        self.look("advance", count, loss)

    def clients(self, numbers, standing):
        self.look("clients", list(numbers), standing)

    def round_done(self, report):
        self.look("round", report.round)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_simulation_says_who_waits_trains_and_has_answered(tmp_path, model_folder, data_file, at_once):
    changes = {"count": "count = 6", "cohort": f"cohort = 4\nat_once = {at_once}", "rounds": "rounds = 2"}
    (tmp_path / "recipe.toml").write_text(recipe_text(model_folder, data_file, **changes))
    recorder = Recorder(tmp_path / "run")
    result = start(load_recipe(tmp_path / "recipe.toml"), tmp_path / "run", recorder)
    assert moment_of(tmp_path / "run") is None
    for report in result.reports:
        cohort = sorted(report["clients"])
        of = [m for m in recorder.seen if sorted(chain(*m.clients.values())) == cohort]
        counts = [tuple(len(m.clients.get(kind, ())) for kind in ("training", "waiting", "answered")) for m in of]
        assert all(sum(found) == 4 and found[0] <= at_once for found in counts)
        assert {(at_once, 4 - at_once, 0), (1, 0, 3), (0, 0, 4)} <= set(counts)
    assert [m.pace is not None for m in recorder.seen] == sorted(m.pace is not None for m in recorder.seen)
    assert recorder.seen[-1].pace is not None
    assert not any(m.error for m in recorder.seen)


def test_every_call_reaches_the_inner_watcher(tmp_path):
    recorder = Recorder(tmp_path)
    watcher = ActivityFile(recorder)
    with watcher.shown_in(tmp_path):
        watcher.note("hello")
        watcher.begin("client 3", 20)
        watcher.advance(2, 1.5)
        watcher.clients([3], "training")
        watcher.round_done(REPORT)
    assert recorder.calls == [
        ("note", "hello"), ("begin", "client 3", 20), ("advance", 2, 1.5), ("clients", [3], "training"), ("round", 0)
    ]  # fmt: skip
    last = recorder.seen[-1]
    assert (last.activity, last.total, last.clients, last.pace) == ("client 3", 20, {"training": [3]}, 7.0)
    assert [text for _, text in last.notes] == ["hello"]


def test_a_client_has_one_standing_and_a_new_round_begins_a_new_list(tmp_path):
    watcher = ActivityFile(Silent())
    with watcher.shown_in(tmp_path):
        watcher.clients([1, 2, 3], "waiting")
        watcher.clients([2], "training")
        watcher.clients([3], "late")
        watcher.clients([], "refused")
        expected = {"training": [2], "waiting": [1], "late": [3]}
        watcher.round_done(REPORT)
        found = moment_of(tmp_path)
        assert found is not None and found.clients == expected  # noqa: PT018
        watcher.clients([4], "waiting")
        found = moment_of(tmp_path)
        assert found is not None and found.clients == {"waiting": [4]}  # noqa: PT018


def test_steps_alone_are_written_at_most_twice_a_second(tmp_path, monkeypatch):
    watcher, clock = ActivityFile(Silent()), [0.0]
    monkeypatch.setattr(now.time, "monotonic", lambda: clock[0])
    with watcher.shown_in(tmp_path):
        watcher.begin("client 1", 1000)
        seen = []
        for _ in range(20):
            clock[0] += 0.125
            watcher.advance()
            found = moment_of(tmp_path)
            seen.append(found and found.done)
    assert sorted(set(seen)) == [0, 4, 8, 12, 16, 20]


def test_it_is_for_its_owner_alone_and_has_no_loss(tmp_path):
    watcher = ActivityFile(Silent())
    with watcher.shown_in(tmp_path):
        watcher.begin("client 1", 10)
        watcher.advance(1, 2.71828)
        watcher.round_done(REPORT)
        assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
        text = (tmp_path / FILE).read_text()
        assert json.loads(text).keys() == {
            "activity", "done", "total", "since", "pace", "clients", "notes", "error"
        }  # fmt: skip
        rest = {name: value for name, value in json.loads(text).items() if name not in ("since", "pace")}  # of clocks
        assert not any(number in json.dumps(rest) for number in ("2.718", "2.5", "1.5"))
    assert os.listdir(tmp_path) == []


def test_the_latest_notes_are_kept(tmp_path):
    watcher = ActivityFile(Silent())
    with watcher.shown_in(tmp_path):
        for k in range(now.NOTES_KEPT + 5):
            watcher.note(f"note {k}")
        found = moment_of(tmp_path)
    assert found is not None
    assert [text for _, text in found.notes] == [f"note {k}" for k in range(5, now.NOTES_KEPT + 5)]


@pytest.mark.parametrize(
    ("error", "text"),
    [(FedKSeedError("too few clients"), "too few clients"), (KeyboardInterrupt(), "Ctrl-C"), (OSError(), "OSError")],
)
def test_what_ended_a_run_stays_to_be_read(tmp_path, error, text):
    with pytest.raises(type(error)), ActivityFile(Silent()).shown_in(tmp_path):
        raise error
    found = moment_of(tmp_path)
    assert found is not None and found.error == text  # noqa: PT018


def test_a_directory_that_cannot_be_written_does_not_stop_the_run(tmp_path):
    watcher = ActivityFile(Silent())
    with watcher.shown_in(tmp_path / "gone"):
        watcher.begin("client 1", 10)
    assert not (tmp_path / "gone").exists()


def test_nothing_is_written_before_the_run_has_its_directory(tmp_path):
    watcher = ActivityFile(Silent())
    watcher.note("loading")
    with watcher.shown_in(tmp_path):
        found = moment_of(tmp_path)
    assert found is not None
    assert [text for _, text in found.notes] == ["loading"]


def test_news_of_many_clients_are_not_each_written(tmp_path, monkeypatch):
    written = []
    now, write = ActivityFile(Silent()), ActivityFile._write
    monkeypatch.setattr(ActivityFile, "_write", lambda self: (written.append(1), write(self)))
    with now.shown_in(tmp_path):
        before = len(written)
        for number in range(5000):
            now.clients([number], "answered")
        assert len(written) - before < 5000 / 10
        now.begin("evaluating", 1)
        found = moment_of(tmp_path)
        assert found is not None
        assert found.clients == {"answered": list(range(5000))}
