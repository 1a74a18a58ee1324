"""Commands that show what the package carries beside the program: its pages, and its examples."""

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument

from ..errors import FedKSeedError
from ..files import border, require_absent, shipped
from ..report.terminal import console, print_rows, say
from .options import Json

PLACES = ("recipes/*.toml", "docs/examples/*.py", "docs/*.ipynb", "examples/flower", "deploy")


def docs(
    page: Annotated[str, Argument(help="A page, as data or docs/data.md; without one, a list of all.")] = "",
    as_json: Json = False,
) -> None:
    """Print a page of the documentation; without a name, list all pages, each with the questions that it answers.

    fedkseed docs data
    """
    index = shipped("docs/README.md")
    if not page:
        rows = re.findall(r"^\| (.*?) \| (\[.*\.md\).*?) \|$", index.read_text(encoding="utf-8"), re.MULTILINE)
        listed = [(", ".join(re.findall(r"\((?:\.\./)?(\w+)\.md\)", links)), question) for question, links in rows]
        print_rows(("page", "question"), listed, as_json)
        if not as_json:
            say("fedkseed docs PAGE prints one")
        return
    names = {path.stem.lower(): path for path in sorted(index.parent.glob("*.md"))}
    file = names.get(Path(page).stem.lower())
    if file is None:
        raise FedKSeedError(f"no page is called {page!r}; there are {', '.join(sorted(names))}")
    text = file.read_text(encoding="utf-8")
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        console.print(Markdown(text, hyperlinks=False))
    else:
        print(text, end="")


def examples(
    names: Annotated[list[str] | None, Argument(help="Examples to copy into this folder; without one, a list.")] = None,
    as_json: Json = False,
) -> None:
    """Copy examples into this folder: recipes, a policy, Python programs, files for servers; without names, list them.

    The recipes need no copy to be run.

    fedkseed examples policy.toml
    fedkseed run --example quickstart
    """
    carried = [path for place in PLACES for path in sorted(shipped(".").glob(place))]
    if not names:
        print_rows(("example", "what it is"), [(path.name, _about(path)) for path in carried], as_json)
        if not as_json:
            say("fedkseed examples NAME copies one into this folder")
        return
    wanted = dict.fromkeys(path for name in names for path in carried if name in (path.name, path.stem))
    if unknown := [name for name in names if not any(name in (path.name, path.stem) for path in carried)]:
        known = ", ".join(path.name for path in carried)
        raise FedKSeedError(f"no example is called {unknown[0]!r}; there are {known}")
    for path in wanted:
        require_absent(Path(path.name), "file")
    for path in wanted:
        with border(f"can't write {path.name}"):
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, path.name)
        say(f"wrote {path.name}")


def recipe_of(file: Path | None, example: str | None) -> Path:
    """The recipe of a command that takes a file or the name of an example."""
    runnable = {path.stem: path for path in sorted(shipped("recipes").glob("*.toml")) if path.stem != "policy"}
    if file is not None and example is None:
        if not file.exists() and str(file) in runnable:
            raise FedKSeedError(f"there is no file {file}; the example of this name: fedkseed run --example {file}")
        return file
    if file is not None or example is None:
        raise FedKSeedError("give one recipe: a file, as `fedkseed init` writes it for your data, or --example NAME")
    if example not in runnable:
        raise FedKSeedError(f"no example of a recipe is called {example!r}; there are {', '.join(runnable)}")
    return runnable[example]


def _about(path: Path) -> str:
    """The first sentence of an example's own text; of a folder, its files."""
    if path.is_dir():
        return "a folder: " + ", ".join(file.name for file in sorted(path.iterdir()) if file.suffix != ".pyc")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    comment = re.match(r"(?:#? ?.+(?:\n|$))*", text)
    joined = " ".join(re.sub(r"^# ?", "", line) for line in comment[0].splitlines()) if comment else ""
    return re.split(r"(?<=[.;]) |: ", joined)[0].rstrip(".;")
