"""Commands of the pages as they stand there: those about keys, and those that need a finished run or a recipe alone."""

import re
import shutil
from pathlib import Path

import pytest

from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import start

from ..conftest import recipe_text
from .test_commands import commands
from .test_documentation import PAGES, ROOT
from .test_export import typed

WALKED = ("export.md", "tutorial.md")  # by tests of their own
RUNS = ("RUN", "STATE", "run", "runs/first", "runs/second", "runs/dolly", "runs/recipe")
# Commands by their first word; they take a second at most with a tiny model.
CHEAP = ("basis", "eval", "export", "generate", "init", "pin", "preview", "report", "resume", "rounds", "untie")
CHEAP += ("reproduce", "verify", "watch")
OTHERWISE = re.compile(r"--serve|--tasks|--history|DIRECTORY|NAME|reproduce (?!.*(--list|--dry-run))")


def block_of_keys(page: str, heading: str) -> list[str]:
    """The commands about keys under a heading, without comments."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.partition("  #")[0].strip() for line in re.findall(r"^    (fedkseed certs .*)$", text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("page", "heading", "last"),
    [
        ("deploy.md", "Three commands", "keys/client-0.pub"),
        ("deploy.md", "Try it on one machine", "keys/client-2"),
        ("peers.md", "Four commands", "keys/client-0.pem"),
        ("privacy.md", "Over a network", "members.pub"),
    ],
)
def test_keys_are_made_by_the_commands_of_a_page(tmp_path, page, heading, last):
    lines = block_of_keys(page, heading)
    assert lines
    for line in lines:
        line, _, into = line.partition(" > ")
        printed = typed(line, tmp_path)
        if into:
            (tmp_path / into).write_text(printed)
    assert (tmp_path / last).stat().st_size > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder, data_file) -> Path:
    """A folder in which the names that stand in pages are a finished run, its recipe, its model and rows."""
    made = tmp_path_factory.mktemp("pages")
    text = recipe_text(model_folder, data_file, rounds="rounds = 2", generated="generated = 1")
    (made / "recipe.toml").write_text(text)
    start(load_recipe(made / "recipe.toml"), made / "RUN")
    (made / "runs").mkdir()
    (made / "models").mkdir()
    for name in RUNS[1:]:
        shutil.copytree(made / "RUN", made / name)
    for name in ("RECIPE", "mine.toml"):
        shutil.copy(made / "recipe.toml", made / name)
    for name in ("MODEL", "models/base"):
        (made / name).symlink_to(model_folder)
    shutil.copy(data_file, made / "rows.jsonl")
    shutil.copy(data_file, made / "public.jsonl")
    return made


def cheap(path: Path) -> list[str]:
    """The whole commands of a page that need no more than a run or a recipe."""
    lines = ["fedkseed " + " ".join(words) for words in commands(path) if words[0] in CHEAP and len(words) > 1]
    return [line for line in dict.fromkeys(lines) if not OTHERWISE.search(line)]


@pytest.mark.parametrize("page", [path.name for path in PAGES if path.name not in WALKED and cheap(path)])
def test_commands_about_a_run_or_a_recipe_do_what_they_say(folder, tmp_path, page):
    shutil.copytree(folder, tmp_path / "here", symlinks=True)
    for line in cheap(ROOT / "docs" / page):
        typed(line, tmp_path / "here")
