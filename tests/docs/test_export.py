"""The commands of docs/export.md as they stand there, with a small model: their answers are those of fedkseed."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader
from typer.testing import CliRunner

from fedkseed.cli import app
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.start_and_resume import start

from ..conftest import recipe_text
from ..models.llama_cpp import LlamaCpp

ROOT = Path(__file__).parents[2]


def block(label: str) -> str:
    """The commands after the line that begins with a label."""
    page = (ROOT / "docs" / "export.md").read_text()
    (found,) = re.findall(rf"^{label}.*\n\n((?:    .*\n)+)", page, re.MULTILINE)
    return re.sub(r"^    ", "", found, flags=re.MULTILINE)


def typed(commands: str, folder: Path) -> str:
    """The output of commands in a folder: those of fedkseed in this process, which saves seconds, others by a shell."""
    output = ""
    for part in re.split(r"; (?=fedkseed|cp)|\n(?=for|fedkseed|python)", commands.strip()):
        if not part.startswith("fedkseed "):
            output += shell(part, folder)
            continue
        with contextlib.chdir(folder):
            result = CliRunner().invoke(app, shlex.split(part)[1:], env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exit_code == 0, result.output
        output += result.stdout if "wrote" not in result.stdout else ""
    return output


def shell(commands: str, folder: Path) -> str:
    """The output of a shell, whose `python` is that of this test."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    settings = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    command = ["bash", "-ec", commands]
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder, data_file) -> Path:
    """A folder with a finished run, its base model, and rows."""
    made = tmp_path_factory.mktemp("typed")
    text = recipe_text(model_folder, data_file, max_tokens='max_tokens = 200\ntemplate = "alpaca"', lr="lr = 1e-2")
    (made / "recipe.toml").write_text(text)
    start(load_recipe(made / "recipe.toml"), made / "RUN")
    (made / "BASE").symlink_to(model_folder)
    (made / "rows.jsonl").write_text(data_file.read_text())
    return made


def test_transformers_answers_as_fedkseed_does(folder):
    shown = typed(f"{block('By fedkseed itself').rstrip()} --quiet", folder)  # else it says what it loads, too
    base, tuned = shown.removeprefix("--- base ---\n").replace("(nothing)", "").split("--- tuned ---\n")
    assert base.strip() != tuned.strip()
    printed = typed(block("By transformers"), folder)
    assert letters(printed) == letters(base + tuned)
    assert len(letters(tuned)) > 20


def letters(text: str) -> str:
    """A text as terminals show it: untuned models write characters of control, too, which rich leaves out."""
    return "".join(letter for letter in text if letter.isprintable() and not letter.isspace())


def test_llama_cpp_is_given_files_that_it_asks_in_the_tuned_words(folder):
    (folder / "docs").symlink_to(ROOT / "docs")
    printed = typed(block("By llama.cpp"), folder)
    paths = [folder / f"{name}-gguf" / "model-q8_0.gguf" for name in ("tuned", "base")]
    assert [re.search(rf"^{path.relative_to(folder)}: ", printed, re.MULTILINE) is not None for path in paths] == [
        True
    ] * 2
    template = GGUFReader(paths[0]).fields["tokenizer.chat_template"].contents()
    messages = [{"role": "user", "content": "How many legs has an ant?"}]
    words = [LlamaCpp(path, template=template).worded(messages) for path in paths]
    assert words[0] == words[1]
    assert "### Instruction:\nHow many legs has an ant?\n\n### Response:" in words[0]


def test_scores_on_a_file_are_printed_beside_the_base_models(folder):
    page = (ROOT / "docs" / "export.md").read_text()
    (line,) = re.findall(r"^    (fedkseed eval RUN .*)$", page, re.MULTILINE)
    printed = typed(line, folder)
    assert printed.count("change from the base model") == 3
    assert all(name in printed for name in ("held-out loss", "token accuracy", "Rouge-L"))
