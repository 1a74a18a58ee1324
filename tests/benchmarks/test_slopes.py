"""The benchmark of how well |ρ| ranks directions, on a tiny model."""

from ..conftest import recipe_text
from . import rows_of


def test_rho_ranks_as_its_own_batch_does_and_better_than_another_batch_ranks(tmp_path, model_folder, data_file):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(model_folder, data_file, generated="generated = 0"))
    figure = tmp_path / "figure.svg"
    more = "--batches", 8, "--directions", 32, "--draws", 1, "--figure", figure
    own, one, true = rows_of("slopes.py", recipe, *more)
    same, other = (float(row["rank correlation"].split(" ± ")[0]) for row in (own, one))
    assert same > 0.95 > other > -0.6
    assert " ± " not in true["rank correlation"]
    assert "</svg>" in figure.read_text()
