"""A recorded run, done again: the same numbers, and a record that says another is found out."""

import tomllib
from pathlib import Path

import pytest

from fedkseed.paper.experiments import Planned
from fedkseed.paper.results import RunOutcome
from fedkseed.paper.run_records import write_records
from fedkseed.run.start_and_resume import start

from ..conftest import recipe_text
from . import rows_of


@pytest.mark.slow(seconds=54, guards="a changed record that passes for repeated")
def test_a_recorded_run_has_the_same_numbers_again_and_a_changed_record_is_named(tmp_path, model_folder, data_file):
    planned = Planned({}, 3, tomllib.loads(recipe_text(Path("$model"), data_file)))
    start(planned.recipe({"model": str(model_folder)}), tmp_path / "first-seed-3")
    folder = tmp_path / "results" / "anything" / "tiny"
    folder.mkdir(parents=True)
    write_records(folder, [(RunOutcome.read(tmp_path / "first-seed-3", {}, 3), planned.table)])
    (row,) = rows_of("again.py", folder, "--model", model_folder)
    assert (row["run"], row["rounds"], row["differ"]) == ("first-seed-3", 3, 0)
    assert row["numbers"] > 30
    rounds = (folder / "rounds.csv").read_text()
    head, base, *rest = rounds.splitlines()
    columns = base.split(",")
    columns[head.split(",").index("loss")] = "1.5"
    (folder / "rounds.csv").write_text("\n".join([head, ",".join(columns), *rest]) + "\n")
    (row,) = rows_of("again.py", folder, "--model", model_folder, status=1)
    assert row["differ"] == 1
    assert row["in"].startswith("loss: 1 of 2, by at most 3e+00 of it, loss after 0: 1.5 on record, ")
