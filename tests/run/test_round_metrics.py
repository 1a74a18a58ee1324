"""One table of metrics: every one of them reaches every reader, also one that a user's program adds."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkseed.paper.results import RunOutcome
from fedkseed.report import page as report
from fedkseed.report.bars import Bars
from fedkseed.report.rounds import print_rounds
from fedkseed.report.terminal import console
from fedkseed.report.watch_state import RunView
from fedkseed.round import Report
from fedkseed.run import trackers
from fedkseed.run.round_metrics import METRICS, SUMS, Metric, line, telling
from fedkseed.run.store import Store
from fedkseed.strategies.kseed import State

from ..conftest import recipe_text

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "metric.py"
PLAIN = Report(0, (0, 2), 4312, 4310, 17_248, 2.97391, 0, 1.2345, staleness=(0, 0))
# Every metric says something here, and no two of them the same.
LATE = replace(
    PLAIN, clients=(0, 1, 3), skipped=2, seconds=8.25, cpu_seconds=6.5, total_down=9001, replayed=23,
    staleness=(0, 5, 1), given_up=1, clock=77.0, epsilon=1.75,
)  # fmt: skip
QUIET = {"bytes/all clients", "seconds of a round", "processor seconds of a round", "virtual time"}  # bars tell of them


@pytest.fixture
def run(tmp_path, model_folder, data_file) -> Path:
    """A run's directory with one round, in which every metric says something."""
    with Store.create(
        tmp_path / "run", recipe_text(model_folder, data_file, count="count = 4\nslow_share = 0.5")
    ) as store:
        at = State(0, np.zeros(4), np.zeros(4), np.zeros(4, np.int64))
        store.commit(at, None)
        store.commit(replace(at, round=1), LATE)
        store.evaluated(0, {"losses": [1.0], "rouge": [], "empty": []})
        return store.directory


@pytest.fixture
def added():
    """The metric of the example, for one test."""
    before = list(METRICS)
    runpy.run_path(str(EXAMPLE))
    (metric,) = METRICS[len(before) :]
    yield metric
    METRICS[:] = before


def on_terminal(done: Report) -> str:
    with console.capture() as captured, Bars(8) as bars:
        bars.round_done(done)
    return " ".join(captured.get().split())


def table_of_rounds(run: Path, monkeypatch) -> dict[str, str]:
    """Column -> its cell in the last row."""
    monkeypatch.setattr(console, "_width", 400)
    with console.capture() as captured:
        print_rounds(RunView.of(Store(run)))
    lines = [re.split("[┃│]", text)[1:-1] for text in captured.get().splitlines() if re.search("[┃│]", text)]
    return {name.strip(): cell.strip() for name, cell in zip(lines[0], lines[-1], strict=True)}


def embedded(run: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report.page([run]))
    assert found is not None
    return json.loads(found[1])


def check_all_readers(metric: Metric, run: Path, monkeypatch) -> None:
    (kept,) = Store(run).reports()
    value, text = metric.value(kept), metric.text(kept)
    assert value
    if metric.name not in QUIET:
        phrase = metric.phrase.format(value) if metric.phrase else f"{metric.title} {text}"
        assert phrase in on_terminal(LATE)
    assert table_of_rounds(run, monkeypatch)[metric.title] == text
    after = trackers.curves(Store(run))[1]
    assert (after.done, after.seconds, after.values[metric.name]) == (1, 8.25, value)
    page = embedded(run)
    shown = {"name": metric.name, "title": metric.title, "unit": metric.unit, "always": metric.always}
    assert shown in page["metrics"]
    (round_,) = page["runs"][0]["rounds"]
    assert (round_["metrics"][metric.name], round_["texts"][metric.name]) == (value, text)
    assert RunOutcome.read(run, {}, 1).metrics[metric.name] == {1: value}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_reaches_every_reader(metric, run, monkeypatch):
    check_all_readers(metric, run, monkeypatch)


def test_the_example_s_metric_reaches_every_reader(added, run, monkeypatch):
    assert (added.name, added.text(Store(run).reports()[0])) == ("clients/kept", "75%")
    check_all_readers(added, run, monkeypatch)


def test_the_example_is_a_program_with_every_command(run):
    """A process of its own: what it adds stays there."""
    command = [sys.executable, str(EXAMPLE), "rounds", str(run)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "kept" in printed
    assert "75%" in printed


def test_names_and_titles_are_told_apart():
    names, titles = [m.name for m in [*METRICS, *SUMS]], [m.title for m in [*METRICS, *SUMS]]
    assert len(set(names)) == len(names)
    assert len(set(titles)) == len(titles)


def test_event_files_add_up_what_was_sent(run):
    sent = trackers.curves(Store(run))[1].values
    assert (sent["bytes/down"], sent["bytes/up"]) == (9001, 17_248 - 9001)


def test_the_line_of_a_plain_round_is_short():
    assert on_terminal(PLAIN) == (
        "round 1 of 8 clients 2 local loss 2.9739 mean |rho| 1.23 bytes a client: 4,312 down, 4,310 up, about 0 s left"
    )


def test_the_line_of_a_round_with_trouble_tells_it():
    shown = on_terminal(LATE)
    for text in ("SKIPPED 2 steps, loss not finite", "staleness up to 5", "given up 1 clients", "replayed 23 coeff"):
        assert text in shown


def test_a_round_without_a_finite_loss_says_so(run, monkeypatch):
    assert "local loss none finite" in on_terminal(replace(PLAIN, loss=float("nan"), skipped=7))
    assert "local loss not sent" in on_terminal(replace(PLAIN, loss=float("nan"), skipped=0))
    with Store(run).locked():
        Store(run).commit(State(1, np.zeros(4), np.zeros(4), np.zeros(4, np.int64)), replace(LATE, loss=float("nan")))
    assert table_of_rounds(run, monkeypatch)["local loss"] == "none finite"
    assert not any("loss/local" in points for _, _, points in trackers.curves(Store(run)))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_number_is_cut_on_a_narrow_terminal(run, width, monkeypatch):
    monkeypatch.setattr(console, "_width", width)
    with console.capture() as captured:
        print_rounds(RunView.of(Store(run)))
    cells = {cell.strip() for cell in re.split("[┃│\\n]", captured.get())}
    assert {metric.text(Store(run).reports()[0]) for metric in METRICS} <= cells


def test_columns_that_say_nothing_in_any_round_are_left_out():
    """A report of an early version: it lacks newer fields."""
    early = {"round": 0, "clients": [1], "bytes_down": 9, "bytes_up": 7, "loss": None, "skipped": 0, "scalar": None}
    titles = [metric.title for metric in telling([early | {"bytes_total": 16}])]
    assert titles == ["clients", "local loss", "bytes down", "bytes up", "bytes of all"]
    assert "–" not in line(early | {"bytes_total": 16})


def test_what_only_looks_at_a_run_does_without_pytorch():
    code = "import sys, fedkseed.report.terminal, fedkseed.run.round_metrics; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
