"""A finished run of the command line."""

import shutil
from pathlib import Path

import pytest

from ..commands import fedkseed
from ..conftest import recipe_text


@pytest.fixture(scope="session")
def finished(tmp_path_factory, model_folder, data_file) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "recipe.toml").write_text(recipe_text(model_folder, data_file))
    result = fedkseed("run", folder / "recipe.toml", "--output", folder / "run")
    assert result.exit_code == 0, result.output
    (folder / "printed.txt").write_text(result.output)
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))
