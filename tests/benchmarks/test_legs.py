"""The benchmark of second halves, on three rounds of a tiny model."""

import csv
import json
import subprocess
import tomllib

import pytest

from fedkseed import start
from fedkseed.recipe.reading import parse
from fedkseed.run.store import Store

from ..conftest import recipe_text, rows
from . import command


@pytest.mark.slow(seconds=26, guards="halves of a run that begin with another model")
def test_second_halves_begin_where_the_first_ended(tmp_path, model_folder, data_file, basis_file):
    lines = {"family": f'family = "informed"\nbasis = "{basis_file}"', "size": "size = 128"}
    lines |= {"algorithm": 'algorithm = "fedkseed-backprop"', "generated": "generated = 0\nevery = 1"}
    start(parse(tomllib.loads(recipe_text(model_folder, data_file, **lines))), tmp_path / "run")
    (tmp_path / "public.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    options = ["--rounds", 2, "--data", tmp_path / "public.jsonl", "--lr", 1e-5, "--output", tmp_path]
    subprocess.run(command("legs.py", tmp_path / "run", *options), check=True)
    with (tmp_path / "legs.csv").open() as file:
        found = [(line["method"], int(line["rounds"]), float(line["loss"])) for line in csv.DictReader(file)]
    assert {(name, number) for name, number, _ in found} == {
        (name, number)
        for name in ("informed", "informed, then hadamard", "informed, then informed of a new basis")
        for number in range(4)
    }
    whole, *others = ([one for one in found if one[0] == name] for name in dict.fromkeys(one[0] for one in found))
    for other in others:
        # A second half begins with a model read from a file, whose weights lie elsewhere in memory: sums may round so.
        assert [loss for *_, loss in other[:3]] == pytest.approx([loss for *_, loss in whole[:3]], rel=1e-6)
        assert other[3][2] != whole[3][2]
    assert len(Store(tmp_path / "run").reports()) == 3
