"""The benchmark of what a basis holds of the clients' gradients, on a tiny model."""

import tomllib

import pytest

from fedkseed import start
from fedkseed.planning.make_basis import basis_of
from fedkseed.recipe.reading import parse
from fedkseed.run.progress import Silent
from fedkseed.weights.basis_file import save_basis

from ..conftest import recipe_text
from . import rows_of


@pytest.mark.slow(seconds=16, guards="a share of the gradient that says nothing of a basis")
def test_a_basis_of_the_clients_own_text_holds_more_than_a_random_one(tmp_path, model_folder, data_file, basis_file):
    text = recipe_text(model_folder, data_file, size="size = 128", generated="generated = 0")
    own = tmp_path / "own.safetensors"
    save_basis(basis_of(parse(tomllib.loads(text)), str(data_file), 16, None, Silent()), own)
    lines = {"family": f'family = "informed"\nbasis = "{own}"', "size": "size = 128", "generated": "generated = 0"}
    lines |= {"algorithm": 'algorithm = "fedkseed-backprop"', "lr": "", "eps": ""}
    start(parse(tomllib.loads(recipe_text(model_folder, data_file, **lines))), tmp_path / "run")
    options = ["--rounds", 0, 3, "--basis", basis_file, "--batches", 4]
    rows = {(row["after rounds"], row["basis"]): row for row in rows_of("capture.py", tmp_path / "run", *options)}
    assert set(rows) == {(rounds, name) for rounds in (0, 3) for name in ("the run's own", basis_file.stem)}
    assert 0.3 < rows[0, "the run's own"]["of the mean gradient"] <= 1.02  # of unit length up to int8
    assert rows[0, basis_file.stem]["of the mean gradient"] < 0.1
