"""The pages of the documentation site: README, docs, pages made of the source, and all files that they link to.

python -m docs.build.site FOLDER

On a forge the pages are read where they lie. A site has one folder of pages, and a link that leads out of it is broken;
so the folder gets a copy of whatever a page links to, and each link stays as it is. Folders that are linked to get a
list of their files.
"""

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fedkseed.recipe.reference import reference

from .api import api

ROOT = Path(__file__).parents[2]
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # and all pages of docs
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
ADDRESS = re.compile(r"[a-z]+:")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def collect(output: Path, root: Path = ROOT, made: Mapping[str, str] | None = None) -> list[Path]:
    """Copy pages and what they link to into a new folder, and write the `made` ones; returns their paths in it."""
    texts = {root / name: text for name, text in (made or {}).items()}
    waiting = [root / name for name in FIRST] + sorted((root / "docs").glob("*.md")) + [*texts]
    found = dict.fromkeys(waiting)
    while waiting:
        page = waiting.pop()
        text = texts.get(page) or page.read_text(encoding="utf-8")
        for target in filter(Path.exists, linked(page, text)):  # the site's generator refuses broken ones
            inside = [target] if target.is_file() else sorted(one for one in target.iterdir() if one.is_file())
            for file in (one for one in inside if one not in found):
                found[file] = None
                waiting += [file] if file.suffix == ".md" else []
            if target.is_dir() and not (target / "README.md").exists():
                listing = output / target.relative_to(root) / "index.md"
                listing.parent.mkdir(parents=True, exist_ok=True)
                lines = [f"# {target.relative_to(root)}", "", *(f"- [{one.name}]({one.name})" for one in inside)]
                listing.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for file in found:
        place = output / file.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file in texts:
            place.write_text(texts[file], encoding="utf-8")
        else:
            shutil.copyfile(file, place)
    return [file.relative_to(root) for file in found]


def linked(page: Path, text: str) -> list[Path]:
    """The files and folders to which the text of a page links, outside of its code."""
    names = LINK.findall(CODE.sub("", text))
    return [(page.parent / name).resolve() for name in names if not ADDRESS.match(name)]


def pages_of_the_source() -> dict[str, str]:
    """The pages that are made of the source, and in no repository."""
    return {"docs/recipe.md": reference(), "docs/api.md": api()}


if __name__ == "__main__":
    collect(Path(sys.argv[1]), made=pages_of_the_source())
