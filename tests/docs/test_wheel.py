"""The wheel: what it is made of, what it says about itself, and that its commands need no checkout."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from datetime import date
from pathlib import Path
from zipfile import ZipFile

import pytest

import fedkseed

from ..smoke import commands, smoke
from .test_documentation import PAGES

ROOT = Path(__file__).parents[2]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=\[; ]", text)[0] for text in requirements]


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    for package in ("build", "hatchling"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    (made,) = folder.glob("*.whl")
    return made


def test_a_wheel_passes_the_check_of_an_index(wheel):
    pytest.importorskip("twine")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)


def test_a_wheel_carries_pages_examples_and_licences_and_nothing_beside_the_package(wheel):
    inside = set(ZipFile(wheel).namelist())
    carried = [*PAGES, *(ROOT / "recipes").glob("*.toml"), *(ROOT / "docs" / "examples").glob("*.py")]
    carried += [*(ROOT / "deploy").iterdir(), ROOT / "recipes" / "paper" / "common.toml"]
    for path in carried:
        assert f"fedkseed/shipped/{path.relative_to(ROOT)}" in inside
    assert {name.partition("/")[0] for name in inside} == {"fedkseed", f"fedkseed-{fedkseed.__version__}.dist-info"}
    licences = {path.name for path in (ROOT / "src").rglob("*.LICENSE.txt")}
    assert licences | {"LICENSE"} == {Path(name).name for name in inside if "/licenses/" in name}


def test_its_commands_need_no_checkout(wheel, tmp_path, model_folder):
    """In an environment of its own, which borrows all other packages; `make wheel` installs them anew."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--ignore-installed", "--no-index", "--quiet", wheel)
    kernels = "fedkseed/directions/numba_cpu"  # those that are compiled already
    shutil.copytree(
        ROOT / "src" / kernels, packages / kernels, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.tmp*")
    )
    smoke(str(python), str(model_folder))
    assert len(commands("")) >= 10


def test_links_of_a_wheel_are_absolute_and_lead_to_files_that_are_there():
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    text = json.loads(done.stdout)["readme"]["text"]
    address = ABOUT["urls"]["Source"]
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    ours = [link for link in links if link.startswith(address)]
    assert all(re.match(r"[a-z]+:|#", link) for link in links)
    assert len(ours) > 20
    for link in ours:
        kind, _, path = link.removeprefix(address + "/").partition("/HEAD/")
        assert kind == ("raw" if path.endswith(".png") else "blob")
        assert (ROOT / path.partition("#")[0]).exists(), link


# --- what it says of itself -----------------------------------------------------------------------


def test_author_addresses_and_version_are_the_same_everywhere():
    (author,) = ABOUT["authors"]
    citation, security = (ROOT / "CITATION.cff").read_text(), (ROOT / "SECURITY.md").read_text()
    assert f"name: {author['name']}\n    email: {author['email']}\n" in citation
    assert f"repository-code: {ABOUT['urls']['Source']}\n" in citation
    assert author["email"] in security
    (version, day), *_ = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version == fedkseed.__version__
    assert f"version: {version}\ndate-released: {date.fromisoformat(day)}\n" in citation
    assert all(licence in citation for licence in ABOUT["license"].split(" AND "))


def test_packages_have_a_lowest_and_a_highest_version_and_the_lowest_are_those_tried_together():
    lowest = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "lowest.txt").read_text(), re.MULTILINE))
    for text in ABOUT["dependencies"]:
        name, least, _ = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", text).groups()
        tried = lowest[name].split("+")[0].split(".")
        assert tried[: least.count(".") + 1] == least.split("."), f"{name}: lowest.txt has {lowest[name]}"
        assert not any(int(part) for part in tried[least.count(".") + 1 :]), f"{name}: lowest.txt has {lowest[name]}"
    for extra, texts in ABOUT["optional-dependencies"].items():
        open_ended = [text for text in texts if extra != "dev" and "==" not in text and "<" not in text]
        assert not open_ended, f"{extra}: {open_ended}"


def test_every_python_is_named_where_it_is_counted():
    minors = re.findall(r"Python :: (3\.\d+)", "\n".join(ABOUT["classifiers"]))
    first, last = (int(minor.partition(".")[2]) for minor in (minors[0], minors[-1]))
    assert minors == [f"3.{minor}" for minor in range(first, last + 1)]
    assert ABOUT["requires-python"] == f">=3.{first},<3.{last + 1}"
    assert f"foreach version,{' '.join(minors)}," in (ROOT / "Makefile").read_text()
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "python: [" + ", ".join(f'"{minor}"' for minor in minors) + "]" in workflow
    assert f"Python 3.{first} to 3.{last}" in (ROOT / "README.md").read_text()


def test_an_image_gets_all_that_a_wheel_is_made_of():
    """docker build sends what .dockerignore lets through; tests build no image."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    made_of = {name.partition("/")[0] for name in build["only-include"]}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert made_of | {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "constraints.txt"} == sent


# --- what it needs --------------------------------------------------------------------------------


def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / "src" / "fedkseed").rglob("*.py"))}


def test_what_a_module_imports_at_its_top_is_a_dependency_or_its_command_says_which_extra():
    """Modules of a carrier (network, harness, endpoint) may import theirs: commands check it before."""
    core = {name.replace("-", "_") for name in names(ABOUT["dependencies"])} | {
        "pydantic_core",
        "tokenizers",
        "llvmlite",
    }
    core |= {"click", "fedkseed", *sys.stdlib_module_names}
    carriers = ("network", "secure", "directions/triton_gpu.py", "report/watch_screen.py")
    for path, text in sources().items():
        place = str(path.relative_to(ROOT / "src" / "fedkseed"))
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                tops = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                tops = [(node.module or "").partition(".")[0]]
            else:
                continue
            assert {*tops} <= core or place.startswith(carriers), f"{place} imports {tops}"


@pytest.mark.parametrize("extra", sorted({*ABOUT["optional-dependencies"]} - {"dev"}))
def test_every_extra_is_named_by_an_error(extra):
    named = re.compile(rf"fedkseed\[{extra}\]|needs_extra\([^)]*\"{extra}\"|`{extra}`: pip install")
    assert any(named.search(text) for text in sources().values())
