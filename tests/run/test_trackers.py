"""Copies for trackers, read back from what each tracker's own package has written."""

import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkseed.cli import app
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.store import Store
from fedkseed.run.trackers import TRACKED, TRACKERS, RoundValues, Trackers, curves, settings
from fedkseed.strategies.kseed import State, importance

from ..conftest import recipe_text


@pytest.fixture(autouse=True)
def places(tmp_path_factory, monkeypatch) -> None:
    """Folders of the test, into which trackers write."""
    folder = tmp_path_factory.mktemp("trackers")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.getbasetemp() / "trackio"))  # which it reads once
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def fedkseed(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder, data_file) -> Path:
    """A run with event files."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("events")
    text = recipe_text(model_folder, data_file, examples="every = 2\nexamples = 8")
    (folder / "recipe.toml").write_text(text)
    result = fedkseed("run", folder / "recipe.toml", "--output", folder / "run", "--tensorboard")
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    made = Path(shutil.copytree(finished, tmp_path / "run"))
    store = Store(made)
    store.change_recipe(store.recipe.read_text().replace('project = "fedkseed"', f'project = "{tmp_path.name}"'))
    return made


def reader(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def drawn(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw: name -> (rounds done, value)."""
    events = reader(run)
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_every_number_is_that_of_the_store(finished):
    read, store = drawn(finished), Store(finished)
    reports, scores = store.reports(), store.evaluations()
    sent = [r["total_down"] for r in reports]
    of_reports = {
        "loss/local": "loss", "size of a scalar gradient": "scalar", "seconds of a round": "seconds",
        "skipped": "skipped", "bytes/down a client": "bytes_down", "bytes/up a client": "bytes_up",
        "bytes/all clients": "bytes_total", "replayed": "replayed", "processor seconds of a round": "cpu_seconds",
    }  # fmt: skip
    expected = {name: [(r["round"] + 1, r[key]) for r in reports] for name, key in of_reports.items()} | {
        "virtual time": [(done, 3.0 * done) for done in (1, 2, 3)],
        "bytes/down": list(enumerate(np.cumsum(sent), 1)),
        "bytes/up": list(enumerate(np.cumsum([r["bytes_total"] for r in reports]) - np.cumsum(sent), 1)),
        "clients": [(r["round"] + 1, len(r["clients"])) for r in reports],
        "staleness": [(done, 0) for done in (1, 2, 3)],
        "given up": [(done, 0) for done in (1, 2, 3)],
        "loss/held-out": [(done, np.mean(s["losses"])) for done, s in scores.items()],
        "Rouge-L": [(done, np.mean(s["rouge"])) for done, s in scores.items() if s["rouge"]],
    }
    assert read.keys() == expected.keys()
    for name, points in expected.items():
        np.testing.assert_allclose(read[name], points, rtol=1e-6, err_msg=name)  # event files hold float32
    assert [done for done, _ in read["loss/held-out"]] == [0, 2, 3]


def test_probabilities_have_a_histogram_a_round(finished):
    drawn = reader(finished).Histograms("directions/probability")
    assert [e.step for e in drawn] == [1, 2, 3]
    for event in drawn:
        state = Store(finished).state(State, event.step)
        assert state is not None
        assert event.histogram_value.num == 64
        assert event.histogram_value.max == pytest.approx(importance(state).max())


def test_a_resumed_run_has_every_round_once(finished, copy):
    fedkseed("rollback", copy, "--to", 1)
    assert fedkseed("resume", copy, "--tensorboard").exit_code == 0
    assert len(list((copy / "tensorboard").iterdir())) == 1
    before, after = drawn(finished), drawn(copy)
    for name in set(before) - {"seconds of a round", "processor seconds of a round"}:
        assert after[name] == before[name]
    assert [done for done, _ in after["seconds of a round"]] == [1, 2, 3]


def test_a_finished_run_gets_its_files_later(finished, copy):
    shutil.rmtree(copy / "tensorboard")
    assert fedkseed("resume", copy, "--tensorboard").exit_code == 0
    assert drawn(copy) == drawn(finished)


def test_a_run_without_the_option_has_no_event_files(copy):
    shutil.rmtree(copy / "tensorboard")
    assert fedkseed("resume", copy).exit_code == 0
    assert not (copy / "tensorboard").exists()


def test_a_refused_run_does_not_touch_the_event_files_of_the_run_that_is_there(finished, copy):
    before = {path.name: path.read_bytes() for path in (copy / "tensorboard").iterdir()}
    result = fedkseed("run", finished.parent / "recipe.toml", "--output", copy, "--tensorboard")
    assert "holds a run already" in result.stderr
    assert {path.name: path.read_bytes() for path in (copy / "tensorboard").iterdir()} == before


Curves = dict[str, list[tuple[int, float]]]  # name of a metric -> (rounds done, value)


def of_mlflow(run: Path) -> dict[str, Curves]:
    """All runs that MLflow knows, by id."""
    from mlflow import MlflowClient

    client, found = MlflowClient(), {}
    for one in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        histories = {name: client.get_metric_history(one.info.run_id, name) for name in one.data.metrics}
        found[one.info.run_id] = {name: [(m.step, m.value) for m in history] for name, history in histories.items()}
    return found


def chunks(log: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which wandb has: 7 bytes of its own, then blocks of 32 KiB.

    A part of a record has a checksum of 4 bytes, its length in 2, and a kind: 1 whole, 2 first, 3 middle, 4 last.
    """
    place, block, found = 7, 1 << 15, b""
    while place + 7 <= len(log):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        found += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield found
            found = b""


def of_wandb(run: Path) -> dict[str, Curves]:
    """The runs in the folder `wandb` of a run, by id; each has a file a process."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Curves] = {}
    for file in sorted((run / "wandb").glob("offline-run-*/run-*.wandb")):
        curves = found.setdefault(file.stem.removeprefix("run-"), {})
        for one in chunks(file.read_bytes()):
            record = Record()
            record.ParseFromString(one)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                for name in items.keys() - {"_step", "_runtime", "_timestamp"}:
                    curves.setdefault(name, []).append((record.history.step.num, float(items[name])))
    return found


def of_trackio(run: Path) -> dict[str, Curves]:
    """All runs that Trackio knows, by name."""
    found: dict[str, Curves] = {}
    file = Path(os.environ["TRACKIO_DIR"]) / f"{Store(run).load_recipe().report.project}.db"
    with closing(sqlite3.connect(file)) as database:
        for name, step, metrics in database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"):
            for metric, value in json.loads(metrics).items():
                found.setdefault(name, {}).setdefault(metric, []).append((step, value))
    return found


READERS = {"mlflow": of_mlflow, "wandb": of_wandb, "trackio": of_trackio}


def expected(run: Path) -> Curves:
    found: Curves = {}
    for done, _, points in curves(Store(run)):
        for name, value in points.items():
            found.setdefault(name, []).append((done, value))
    return found


def copies(name: str, run: Path, count: int = 1) -> dict[str, Curves]:
    """All copies that a tracker has, once the latest is complete: a process of wandb's writes a little later."""
    end = time.monotonic() + 60
    while expected(run) not in (found := READERS[name](run)).values() and time.monotonic() < end:
        time.sleep(0.1)
    assert len(found) == count
    return found


def hand_on(name: str, run: Path) -> None:
    """Hand on what a tracker lacks, as a process does that goes on with a finished run."""
    with Store(run).locked(), Trackers([name], print).copying(run):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow calls what SQLAlchemy 2.1 deprecates
@pytest.mark.parametrize("name", READERS)
def test_a_tracker_has_every_round_once_however_often_the_run_goes_on(copy, name):
    pytest.importorskip(TRACKERS[name].module)
    fedkseed("rollback", copy, "--to", 1)
    hand_on(name, copy)
    ((first, curves),) = copies(name, copy).items()
    assert curves == expected(copy)
    Store(copy).change_recipe(Store(copy).recipe.read_text().replace("to = []", f'to = ["{name}"]'))
    result = fedkseed("resume", copy, "--json")  # by the recipe alone
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rounds"] == 3
    hand_on(name, copy)
    ((second, curves),) = copies(name, copy).items()
    assert second == first
    assert curves == expected(copy)
    assert [done for done, _ in curves["loss/local"]] == [1, 2, 3]
    assert [done for done, _ in curves["loss/held-out"]] == [0, 2, 3]
    assert Store(copy).recall(TRACKED)[name]["done"] == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", READERS)
def test_after_a_rollback_a_tracker_gets_another_copy(copy, name):
    pytest.importorskip(TRACKERS[name].module)
    hand_on(name, copy)
    (first,) = copies(name, copy)
    fedkseed("rollback", copy, "--to", 1)
    hand_on(name, copy)
    runs = copies(name, copy, 2)
    (second,) = runs.keys() - {first}
    assert runs[second] == expected(copy)
    assert [done for done, _ in runs[first]["loss/local"]] == [1, 2, 3]  # what was handed on is not taken back


@pytest.fixture
def added(monkeypatch):
    """A function that adds a tracker of the test."""

    def add(kind: type) -> str:
        monkeypatch.setitem(TRACKERS, "added", kind)
        return "added"

    return add


def test_a_round_is_handed_on_with_its_evaluation(copy, added):
    handed: list[list[int] | bool] = []

    class Kept:
        module, install, id = "json", "", "one"

        def __init__(self, store: Store, continued: str | None) -> None: ...

        def write(self, rounds: Sequence[RoundValues]) -> None:
            handed.append([values.done for values in rounds])

        def close(self, ended: bool) -> None:
            handed.append(ended)

    name = added(Kept)
    fedkseed("rollback", copy, "--to", 2)
    trackers = Trackers([name], print)
    with trackers.copying(copy):
        trackers.hand_on()
        assert handed == [[0, 1]]  # the evaluation after the second round may still come
    assert handed[1:] == [[2], True]
    fedkseed("rollback", copy, "--to", 1)
    trackers = Trackers([name], print)

    def stop() -> None:
        trackers.hand_on()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), trackers.copying(copy):
        stop()
    assert handed[3:] == [[0], False]


def test_a_tracker_that_fails_does_not_stop_the_run_and_is_named(copy, added):
    class Failing:
        module, install, id = "json", "", "one"

        def __init__(self, store: Store, continued: str | None) -> None: ...

        def write(self, rounds: Sequence[RoundValues]) -> None:
            raise ConnectionError("no way to the server\nand more")

        def close(self, ended: bool) -> None: ...

    notes: list[str] = []
    trackers = Trackers([added(Failing)], notes.append)
    before = Store(copy).recall(TRACKED)
    with trackers.copying(copy):
        trackers.hand_on()
        trackers.hand_on()
    assert notes == ["added gets no more numbers (no way to the server); `fedkseed resume` hands on what it lacks"]
    assert Store(copy).recall(TRACKED) == before


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_whose_package_is_missing_is_refused_with_the_line_that_installs_it(
    finished, tmp_path, monkeypatch, name
):
    monkeypatch.setitem(sys.modules, TRACKERS[name].module, None)
    chosen = ["--output", tmp_path / "run", "--set", f"report.to=['{name}']"]
    result = fedkseed("run", finished.parent / "recipe.toml", *chosen)
    assert result.exit_code == 2
    assert f"{name} needs a package that is missing" in result.stderr
    assert TRACKERS[name].install in result.stderr
    assert not (tmp_path / "run").exists()


def test_nothing_is_copied_unless_it_is_asked_for(finished, copy):
    assert load_recipe(finished.parent / "recipe.toml").report.to == []
    before = sorted(path.name for path in copy.iterdir())
    with Store(copy).locked(), Trackers([], print).copying(copy):
        pass
    assert sorted(path.name for path in copy.iterdir()) == before
    assert not {"mlflow", "wandb", "trackio"} & {*(Store(copy).recall(TRACKED) or {})}


def test_settings_have_no_paths(finished):
    found = settings(Store(finished).load_recipe())
    assert (found["training.lr"], found["training.rounds"], found["data.source"]) == (1e-3, 3, "rows.jsonl")
    assert not [value for value in found.values() if "/" in str(value)]
