"""Scores on any file: those of the run where the rows are the run's own, for coefficients and for adapters."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fedkseed import FedKSeedError
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.progress import Silent
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned
from fedkseed.tuned.measure import measure

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers renames


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedavg", "fedit"])
def test_the_runs_own_rows_give_the_runs_own_numbers(algorithm, finished, tmp_path):
    run = finished(algorithm=f'algorithm = "{algorithm}"', lr="lr = 3e-3")
    held_out = Simulation(load_recipe(run / "recipe.toml")).shares.held_out
    data = str(tmp_path / "rows.jsonl")
    Path(data).write_text("".join(json.dumps(asdict(encoded.example)) + "\n" for encoded in held_out))
    known = Store(run).evaluations()
    before, after = measure(open_tuned(run), data, ["rouge"], Silent(), generated=2, beside_base=True)
    # rows come in another order, so that batches are padded otherwise, and adapters may be merged: float32's rounding
    assert sorted(before.losses) == pytest.approx(sorted(known[0]["losses"]), abs=1e-5)
    assert sorted(after.losses) == pytest.approx(sorted(known[3]["losses"]), abs=1e-5)
    assert len(after.rouge) == 2
    export(open_tuned(run), tmp_path / "hf")
    none, folder = measure(open_tuned(tmp_path / "hf"), data, ["accuracy"], Silent())
    assert none.losses == []
    assert sorted(folder.losses) == pytest.approx(sorted(known[3]["losses"]), abs=1e-5)
    assert len(folder.scores["accuracy"]) == 8
    assert max(abs(a - b) for a, b in zip(sorted(before.losses), sorted(after.losses), strict=True)) > 1e-3


def test_rows_are_drawn_and_long_ones_left_out(finished, data_file):
    tuned = open_tuned(finished(lr="lr = 3e-3"))
    assert len(measure(tuned, str(data_file), [], Silent())[1].losses) == 36
    assert len(measure(tuned, str(data_file), [], Silent(), examples=5)[1].losses) == 5
    shorter = len(measure(tuned, str(data_file), [], Silent(), max_tokens=180)[1].losses)
    assert 0 < shorter < 36
    with pytest.raises(FedKSeedError, match="has no example of 3 tokens or fewer"):
        measure(tuned, str(data_file), [], Silent(), max_tokens=3)
    with pytest.raises(FedKSeedError, match=r"rows.jsonl asks for 99 held-out examples, 36 are there"):
        measure(tuned, str(data_file), [], Silent(), examples=99)


def test_choices_have_the_files_own_responses(finished, data_file):
    found = measure(open_tuned(finished(lr="lr = 3e-3")), str(data_file), ["choice"], Silent())[1]
    assert len(found.choices) == 36
    assert {true for true, _ in found.choices} == {
        json.loads(line)["response"] for line in data_file.read_text().splitlines()
    }
