"""The benchmark of what few directions lose, on recorded runs of a tiny model."""

import tomllib
from pathlib import Path

import pytest

from fedkseed.paper.experiments import Planned
from fedkseed.paper.results import RunOutcome
from fedkseed.paper.run_records import write_records
from fedkseed.run.start_and_resume import start

from ..conftest import recipe_text
from . import rows_of


@pytest.mark.slow(seconds=20, guards="a prediction beside runs of another K, or of other rates")
def test_what_each_k_lost_stands_beside_what_is_predicted(tmp_path, model_folder, data_file):
    recorded, gains = [], {}
    for size in (64, 256):
        table = tomllib.loads(recipe_text(Path("$model"), data_file, generated="generated = 0"))
        table |= {"directions": {"size": size}}
        planned = Planned({}, 3, table)
        start(planned.recipe({"model": str(model_folder)}), tmp_path / f"{size}-seed-3")
        outcome = RunOutcome.read(tmp_path / f"{size}-seed-3", {}, 3)
        gains[size] = outcome.loss[0] - outcome.loss[outcome.rounds]
        recorded.append((outcome, table))
    folder = tmp_path / "results" / "anything" / "tiny"
    folder.mkdir(parents=True)
    write_records(folder, recorded)
    few, most = rows_of("pool.py", folder, "--model", model_folder, "--samples", 64)
    assert (few["K"], most["K"]) == (64, 256)
    assert [row["gain (nats)"] for row in (few, most)] == pytest.approx([*gains.values()])
    assert float(few["lost"]) == pytest.approx(1 - gains[64] / gains[256], abs=0.01)
    assert 0 < float(few["predicted"]) < 1
    assert most["predicted"] == "0.00"
