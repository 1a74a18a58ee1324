"""The benchmark that fits the whole output layer, on a tiny model."""

import tomllib
from statistics import fmean

from fedkseed import start
from fedkseed.recipe.reading import parse

from ..conftest import recipe_text
from . import rows_of


def test_a_small_penalty_fits_the_clients_tokens_and_a_large_one_leaves_the_base_model(
    tmp_path, model_folder, data_file
):
    text = recipe_text(model_folder, data_file, generated="generated = 0")
    run = start(parse(tomllib.loads(text)), tmp_path / "run")
    fitted, base = rows_of("output_layer.py", tmp_path / "run", "--penalties", 1e-3, 1e6)
    assert fitted["loss of clients' tokens"] < base["loss of clients' tokens"] - 0.1
    assert abs(base["loss"] - fmean(run.before.losses)) < 1e-3
