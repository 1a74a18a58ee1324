"""Scores on any file: those of the run where the rows are the run's own, for coefficients and for adapters."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fedkseed import FedKSeedError
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.progress import Silent
from fedkseed.run.simulation import Simulation, start
from fedkseed.run.store import Store
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned
from fedkseed.tuned.measure import measure

from ..conftest import recipe_text

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers renames


def made(folder: Path, model: Path, data: Path, **changes: str) -> tuple[Path, str]:
    """A finished run, and a file of its held-out rows."""
    (folder / "recipe.toml").write_text(recipe_text(model, data, **changes))
    recipe = load_recipe(folder / "recipe.toml")
    start(recipe, folder / "run")
    rows = [asdict(encoded.example) for encoded in Simulation(recipe).shares.held_out]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "run", str(folder / "rows.jsonl")


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedavg", "fedit"])
def test_the_runs_own_rows_give_the_runs_own_numbers(algorithm, tmp_path, model_folder, data_file):
    run, data = made(tmp_path, model_folder, data_file, algorithm=f'algorithm = "{algorithm}"', lr="lr = 3e-3")
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


def test_rows_are_drawn_and_long_ones_left_out(tmp_path, model_folder, data_file):
    run, _ = made(tmp_path, model_folder, data_file)
    tuned = open_tuned(run)
    assert len(measure(tuned, str(data_file), [], Silent())[1].losses) == 36
    assert len(measure(tuned, str(data_file), [], Silent(), examples=5)[1].losses) == 5
    shorter = len(measure(tuned, str(data_file), [], Silent(), max_tokens=180)[1].losses)
    assert 0 < shorter < 36
    with pytest.raises(FedKSeedError, match="has no example of 3 tokens or fewer"):
        measure(tuned, str(data_file), [], Silent(), max_tokens=3)
    with pytest.raises(FedKSeedError, match=r"rows.jsonl asks for 99 held-out examples, 36 are there"):
        measure(tuned, str(data_file), [], Silent(), examples=99)


def test_choices_have_the_files_own_responses(tmp_path, model_folder, data_file):
    run, _ = made(tmp_path, model_folder, data_file)
    found = measure(open_tuned(run), str(data_file), ["choice"], Silent())[1]
    assert len(found.choices) == 36
    assert {true for true, _ in found.choices} == {
        json.loads(line)["response"] for line in data_file.read_text().splitlines()
    }
