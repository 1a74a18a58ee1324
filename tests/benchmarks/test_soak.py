"""The benchmark of hours: three minutes of it, its fit of a line, and what it draws of samples."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from . import FOLDER

sys.path.insert(0, str(FOLDER))  # a benchmark is a script, not a module

pytest.importorskip("flwr")  # the network of the tests needs it

import soak


def test_a_slope_has_an_error_that_grows_with_the_correlation_of_neighbours():
    rng, t = np.random.default_rng(0), np.arange(0, 3600, 5.0)
    noise, walk = rng.normal(size=t.size), np.zeros(t.size)
    for k in range(1, t.size):
        walk[k] = 0.9 * walk[k - 1] + rng.normal()
    slope, error = soak.fitted([np.c_[t, 7 + 2 * t / 3600 + noise]])
    of_ordinary_least_squares = float(noise.std() / np.sqrt(((t / 3600 - 0.5) ** 2).sum()))
    assert slope == pytest.approx(2, abs=3 * error)
    assert error == pytest.approx(of_ordinary_least_squares, rel=0.1)
    correlated = soak.fitted([np.c_[t, walk]])[1]
    alone = float(walk.std() / np.sqrt(((t / 3600 - 0.5) ** 2).sum()))
    assert correlated == pytest.approx(alone * (1.9 / 0.1) ** 0.5, rel=0.25)


def test_each_life_has_its_level_and_its_first_part_is_left_out(tmp_path):
    rng = np.random.default_rng(1)
    samples = [
        (who, pid, t, 100 * pid + (50 if t - begin < 600 else 0) + growth * t / 3600 + rng.normal(), 7)
        for pid, (who, begin, growth) in enumerate(
            [("server", 0, 0), ("server", 2000, 0), ("join", 0, 0), ("worker", 0, 60)]
        )
        for t in np.arange(begin, begin + 2000, 5.0).tolist()
    ]
    end = {"what": {"rounds": 3}, "seconds": 5100, "on": "a processor", "at": "abc", "date": "2030-01-31"}
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*samples, end]))
    rows = {row["process"]: row for row in soak.slopes(samples, 5100)}
    assert [rows[who]["lives"] for who in ("server", "join", "worker")] == [2, 1, 1]
    assert [rows[who]["MB: flat"] for who in ("server", "join", "worker")] == ["yes", "yes", "no"]
    slope, error = map(float, str(rows["worker"]["MB an hour"]).split("±"))
    assert slope == pytest.approx(60, abs=3 * error)
    assert {row["descriptors: flat"] for row in rows.values()} == {"yes"}
    drawn = soak.draw(tmp_path / "s.jsonl")
    assert drawn.startswith("# A federation of 50 clients for 85 minutes, 2030-01-31\n")
    assert "| rounds | 3 |" in drawn
    assert "| server | 2 |" in drawn


@pytest.mark.network
def test_three_minutes_of_it_lose_no_answer_and_take_no_bad_one(tmp_path):
    output = tmp_path / "s.jsonl"
    command = [sys.executable, FOLDER / "soak.py", "--minutes", "3", "--output", output]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    *samples, end = map(json.loads, output.read_text().splitlines())
    what = end["what"]
    assert sum(number for kind, number in what.items() if kind.startswith("bad: ")) > 0
    assert (what["of them lost"], what["bad, in the run"], what["kills of the server"]) == (0, 0, 3)
    assert what["rounds"] > 0 < what["good answers of the fleet"] <= what["uploads that `verify` finds right"]
    assert {who for who, *_ in samples} == {"server", "join", "worker"}
    assert f"| rounds | {what['rounds']} |" in said
