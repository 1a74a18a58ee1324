"""The pages of the documentation site: README, docs, and all files that they link to, at their places.

python -m docs.build.site FOLDER

On a forge the pages are read where they lie. A site has one folder of pages, and a link that leads out of it is broken;
so the folder gets a copy of whatever a page links to, and each link stays as it is. Folders that are linked to get a
list of their files.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # and all pages of docs
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
ADDRESS = re.compile(r"[a-z]+:")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def collect(output: Path, root: Path = ROOT) -> list[Path]:
    """Copy pages and what they link to into a new folder; returns their paths in it."""
    waiting = [root / name for name in FIRST] + sorted((root / "docs").glob("*.md"))
    found = dict.fromkeys(waiting)
    while waiting:
        page = waiting.pop()
        for target in filter(Path.exists, linked(page)):  # a broken link stays, and the site's generator refuses it
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
        shutil.copyfile(file, place)
    return [file.relative_to(root) for file in found]


def linked(page: Path) -> list[Path]:
    """The files and folders to which a page links, outside of its code."""
    names = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [(page.parent / name).resolve() for name in names if not ADDRESS.match(name)]


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
