"""The benchmark of the error of scalars at a perturbation scale, on a tiny model."""

from ..conftest import recipe_text
from . import rows_of


def test_the_error_of_a_scalar_grows_with_eps_and_is_larger_of_one_point(tmp_path, model_folder, data_file):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(model_folder, data_file, generated="generated = 0"))
    small, large = rows_of("scalars.py", recipe, "--pairs", 4, "--eps", 1e-3, 1e-1, "--reference", 1e-4)
    assert (small["ε"], large["ε"]) == ("0.001", "0.1")
    assert small["two points: error"] < 0.01 < large["two points: error"]
    assert small["two points: error"] < small["one point: error"] < large["one point: error"]
    assert small["two points: correlation"] > 0.999
    assert small["two points: wrong signs"] == 0
    # A client's own scalars, along the engine's directions: the same but for the rounding of its losses.
    assert abs(large["two points, float32: error"] - large["two points: error"]) < 0.05 * large["two points: error"]
