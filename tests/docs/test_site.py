"""The documentation site: its generator finds no broken link, and finds one where there is one."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from docs.build.site import collect, pages_of_the_source

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")} | {*pages_of_the_source()}


class Page(HTMLParser):
    """The links of a page, and the names by which others reach its parts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.names = list[str](), set[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.names.add(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")


def build(folder: Path) -> subprocess.CompletedProcess:
    """The generator's strict build of the pages in a folder."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    collect(folder / "build" / "pages", made=pages_of_the_source())
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_link_or_anchor_of_the_site_is_broken_and_nothing_is_fetched(site):
    """Every page is read again, without the generator's own check."""
    out = site / "build" / "site"
    pages = {path: Page(path) for path in out.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > len(PAGES)
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                assert not re.search(r"\.(js|css|woff2?)$", to.path), f"{path}: {link} is fetched from elsewhere"
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.relative_to(out)}: {link}"
            assert not to.fragment or target not in pages or to.fragment in pages[target].names, f"{path}: {link}"
            followed += 1
    assert followed > 1000


def test_every_page_is_in_the_navigation_and_in_the_site(site):
    def files(nav: object) -> list[str]:
        inner = nav.values() if isinstance(nav, dict) else nav
        return [nav] if isinstance(nav, str) else [name for one in inner for name in files(one)]

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert {name for name in listed if name.startswith("docs/")} == PAGES
    assert len(listed) == len({*listed})
    for name in listed:
        place = (site / "build" / "site" / name).with_suffix("")
        assert (place.parent if place.name == "README" else place).joinpath("index.html").exists(), name


@pytest.mark.parametrize("link", ["nowhere.md", "tutorial.md#no-such-heading"])
def test_a_broken_link_is_refused(site, tmp_path, link):
    shutil.copytree(site / "build" / "pages", tmp_path / "build" / "pages")
    with (tmp_path / "build" / "pages" / "docs" / "report.md").open("a") as page:
        page.write(f"\n[broken]({link})\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert f"[broken]({link})" in re.sub(r"\x1b\[[\d;]*m", "", done.stderr)


def test_files_that_pages_link_to_are_copied_and_folders_listed(tmp_path):
    root = tmp_path / "root"
    texts = {
        "README.md": "[a](docs/a.md) [x](recipes/x.toml) [web](https://example.org/nothing)",
        "docs/a.md": "[notes](../notes/one.md#here) [all](../recipes)\n```\n[no](../secret.txt)\n```\n",
        "notes/one.md": "![picture](one.svg)", "notes/one.svg": "<svg/>", "notes/other.md": "nobody links here",
        **dict.fromkeys(("CONTRIBUTING.md", "CHANGELOG.md", "recipes/x.toml", "recipes/y.toml", "secret.txt"), ""),
    }  # fmt: skip
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    collect(tmp_path / "pages", root)
    found = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*") if path.is_file()}
    assert found == {
        "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/a.md", "notes/one.md", "notes/one.svg", "recipes/x.toml",
        "recipes/y.toml", "recipes/index.md",
    }  # fmt: skip
    assert "- [y.toml](y.toml)" in (tmp_path / "pages" / "recipes" / "index.md").read_text()
