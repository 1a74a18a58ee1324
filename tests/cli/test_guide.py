"""The pages and examples that the package carries, and what names them."""

import re
from pathlib import Path

import pytest

from fedkseed import __version__, load_recipe
from fedkseed.cli.guide import recipe_of
from fedkseed.files import shipped

from ..commands import documented, fedkseed, refused

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.stem for path in (ROOT / "docs" / "examples").glob("*.py")}
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml") if path.stem != "policy")


def test_pages_are_listed_with_their_questions():
    rows = documented("docs")
    assert sorted({"README", *(name for row in rows for name in row["page"].split(", "))} - {"CONTRIBUTING"}) == PAGES
    assert all("?" in row["question"] for row in rows)
    assert "fedkseed docs PAGE" in fedkseed("docs").stdout


@pytest.mark.parametrize("name", ["data", "data.md", "docs/data.md", "Data"])
def test_a_page_is_printed_as_it_is(name):
    assert fedkseed("docs", name).stdout == (ROOT / "docs" / "data.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_command_of_a_page_names_examples_that_a_wheel_s_user_has(name):
    """A copy by `fedkseed examples`, and no file of a checkout."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert "fedkseed examples" in page or "](examples/" not in page.replace("](../examples/", "](examples/")
    for words in re.findall(r"^    +(.*)$|`([^`\n]+)`", page, re.MULTILINE):
        command = "".join(words)
        assert not re.match(r"(python|flwr run|fedkseed [a-z-]+) (docs/)?examples/", command), command
        if (copied := re.match(r"python (\w+)\.py", command)) and copied[1] in EXAMPLES:
            assert re.search(rf"fedkseed examples [\w. ]*{copied[1]}", page), command


def test_a_page_that_is_not_there_is_refused_with_those_that_are():
    assert "no page is called 'prices'; there are aggregation, algorithms," in refused("docs", "prices")


def test_every_example_is_listed_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {row["example"]: row["what it is"] for row in documented("examples")}
    assert {f"{name}.toml" for name in RECIPES} | {"policy.toml", "departments.py", "flower", "deploy"} <= {*rows}
    assert {path.name for path in (ROOT / "docs" / "examples").glob("*.py")} <= {*rows}
    assert all(len(text) > 10 for text in rows.values())
    assert not [*tmp_path.iterdir()]


def test_examples_are_copied_into_the_folder_and_over_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fedkseed("examples", "quickstart", "policy.toml", "deploy").exit_code == 0
    names = {"quickstart.toml", "quickstart.ipynb", "policy.toml", "deploy"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert Path("policy.toml").read_text() == (ROOT / "recipes" / "policy.toml").read_text()
    Path("policy.toml").write_text("mine")
    assert "policy.toml exists already" in refused("examples", "dolly", "policy")
    assert Path("policy.toml").read_text() == "mine"
    assert not Path("dolly.toml").exists()
    assert "no example is called 'network2'; there are " in refused("examples", "network2")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_run_by_its_name(name):
    assert load_recipe(recipe_of(None, name)) == load_recipe(ROOT / "recipes" / f"{name}.toml")


def test_a_run_wants_a_file_or_an_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "give one recipe: a file, as `fedkseed init` writes it" in refused("run")
    assert "give one recipe" in refused("run", "mine.toml", "--example", "quickstart")
    assert "no example of a recipe is called 'policy'; there are billions, costs, dolly" in refused(
        "run", "--example", "policy"
    )
    assert "the example of this name: fedkseed run --example quickstart" in refused("run", "quickstart")


def test_an_example_without_its_model_says_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may have runs/quickstart
    text = refused("run", "--example", "quickstart", "--set", "model.name=package:no_such_model/a.gguf")
    assert text.endswith("install it with: pip install --no-deps no-such-model")


def test_a_file_that_an_installation_lacks_is_refused():
    with pytest.raises(ValueError, match=r"this installation of fedkseed lacks docs/nothing\.md; install the package"):
        shipped("docs/nothing.md")


def texts() -> list[Path]:
    """What users of a wheel read: sources with their messages, recipes, files for servers."""
    kinds = ("src/**/*.py", "src/**/*.js", "recipes/**/*.toml", "deploy/*", "docs/examples/*.py")
    return [path for kind in kinds for path in sorted(ROOT.glob(kind))]


def test_pages_and_examples_that_a_text_names_are_carried():
    named = {"page": set[str](), "example": set[str]()}
    for path in texts():
        text = path.read_text()
        named["page"] |= {*re.findall(r"(?<![\w/])docs/(?!PAGE)(\w+)\.md|fedkseed docs (?!PAGE)(\w+)", text)}
        named["example"] |= {*re.findall(r"fedkseed examples (?!NAME)(\w+)|--example (?!NAME)([a-z]\w*)", text)}
    pages, examples = ({"".join(names) for names in named[kind]} for kind in ("page", "example"))
    assert len(pages) > 15
    assert not pages - {*PAGES}
    assert {"policy", "quickstart", "deploy"} <= examples
    for name in examples:
        assert (ROOT / "deploy").name == name or (ROOT / "recipes" / f"{name}.toml").exists(), name


def test_versions_are_those_of_the_page_of_policies():
    program, formats = fedkseed("--version").stdout.splitlines()
    assert program == f"fedkseed {__version__}"
    printed = re.findall(r"([a-z ]+ \d+)(?:, |;)", formats)
    stated = re.findall(r"^\| .* \| ([a-z ]+ \d+) \|", (ROOT / "docs" / "policies.md").read_text(), re.MULTILINE)
    assert len(printed) == 5
    assert [one.strip() for one in printed] == stated
