"""TensorBoard event files, read back with TensorBoard's own reader."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkseed.cli import app
from fedkseed.run.store import Store
from fedkseed.strategies.kseed import State, importance

from ..conftest import recipe_text

pytest.importorskip("tensorboard")


def fedkseed(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder, data_file) -> Path:
    """A run with event files."""
    folder = tmp_path_factory.mktemp("events")
    text = recipe_text(model_folder, data_file, examples="every = 2\nexamples = 8")
    (folder / "recipe.toml").write_text(text)
    result = fedkseed("run", folder / "recipe.toml", "--output", folder / "run", "--tensorboard")
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def reader(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw: name -> (rounds done, value)."""
    events = reader(run)
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_every_number_is_that_of_the_store(finished):
    read, store = curves(finished), Store(finished)
    reports, scores = store.reports(), store.evaluations()
    sent = [r["total_down"] for r in reports]
    expected = {
        "loss/local": [(r["round"] + 1, r["loss"]) for r in reports],
        "size of a scalar gradient": [(r["round"] + 1, r["scalar"]) for r in reports],
        "seconds of a round": [(r["round"] + 1, r["seconds"]) for r in reports],
        "virtual time": [(done, 3.0 * done) for done in (1, 2, 3)],
        "bytes/down": list(enumerate(np.cumsum(sent), 1)),
        "bytes/up": list(enumerate(np.cumsum([r["bytes_total"] for r in reports]) - np.cumsum(sent), 1)),
        "clients": [(r["round"] + 1, len(r["clients"])) for r in reports],
        "skipped": [(r["round"] + 1, r["skipped"]) for r in reports],
        "bytes/down a client": [(r["round"] + 1, r["bytes_down"]) for r in reports],
        "bytes/up a client": [(r["round"] + 1, r["bytes_up"]) for r in reports],
        "bytes/all clients": [(r["round"] + 1, r["bytes_total"]) for r in reports],
        "replayed": [(r["round"] + 1, r["replayed"]) for r in reports],
        "staleness": [(done, 0) for done in (1, 2, 3)],
        "given up": [(done, 0) for done in (1, 2, 3)],
        "processor seconds of a round": [(r["round"] + 1, r["cpu_seconds"]) for r in reports],
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
    before, after = curves(finished), curves(copy)
    for name in set(before) - {"seconds of a round", "processor seconds of a round"}:
        assert after[name] == before[name]
    assert [done for done, _ in after["seconds of a round"]] == [1, 2, 3]


def test_a_finished_run_gets_its_files_later(finished, copy):
    shutil.rmtree(copy / "tensorboard")
    assert fedkseed("resume", copy, "--tensorboard").exit_code == 0
    assert curves(copy) == curves(finished)


def test_a_run_without_the_option_has_no_event_files(copy):
    shutil.rmtree(copy / "tensorboard")
    assert fedkseed("resume", copy).exit_code == 0
    assert not (copy / "tensorboard").exists()


def test_a_refused_run_does_not_touch_the_event_files_of_the_run_that_is_there(finished, copy):
    before = {path.name: path.read_bytes() for path in (copy / "tensorboard").iterdir()}
    result = fedkseed("run", finished.parent / "recipe.toml", "--output", copy, "--tensorboard")
    assert "holds a run already" in result.stderr
    assert {path.name: path.read_bytes() for path in (copy / "tensorboard").iterdir()} == before


def test_a_missing_package_is_refused_before_the_run_and_names_the_extra(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = fedkseed("run", finished.parent / "recipe.toml", "--output", tmp_path / "run", "--tensorboard")
    assert result.exit_code == 2
    assert "pip install 'fedkseed[plots]'" in result.stderr
    assert not (tmp_path / "run").exists()
