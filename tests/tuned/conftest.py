"""Finished runs, each made once for all tests of this folder: a test that changes one copies it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import start

from ..conftest import recipe_text


@pytest.fixture(scope="session")
def finished(tmp_path_factory, model_folder, data_file) -> Callable[..., Path]:
    """The directory of a finished run, by changes of the recipe, see `recipe_text`; `more` is added at its end."""

    @cache
    def finish(model: Path = model_folder, *, tuned: str = '["*"]', more: str = "", **changes: str) -> Path:
        folder = tmp_path_factory.mktemp("finished")
        named = f"tuned = {tuned}\n" if tuned else ""  # empty: what the algorithm tunes
        text = recipe_text(model, data_file, **changes).replace("[data]", f"{named}[data]", 1)
        (folder / "recipe.toml").write_text(text + more)
        start(load_recipe(folder / "recipe.toml"), folder / "run")
        return folder / "run"

    return finish
