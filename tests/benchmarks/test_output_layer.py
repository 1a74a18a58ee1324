"""The benchmark that fits the whole output layer, on a tiny model."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import fmean

from fedkseed import start
from fedkseed.recipe.reading import parse

from ..conftest import recipe_text

ROOT = Path(__file__).parents[2]


def test_a_small_penalty_fits_the_clients_tokens_and_a_large_one_leaves_the_base_model(
    tmp_path, model_folder, data_file
):
    text = recipe_text(model_folder, data_file, generated="generated = 0")
    run = start(parse(tomllib.loads(text)), tmp_path / "run")
    command = [sys.executable, str(ROOT / "benchmarks" / "output_layer.py"), str(tmp_path / "run")]
    options = ["--penalties", "1e-3", "1e6", "--json"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    fitted, base = json.loads(done.stdout)["rows"]
    assert fitted["loss of clients' tokens"] < base["loss of clients' tokens"] - 0.1
    assert abs(base["loss"] - fmean(run.before.losses)) < 1e-3
