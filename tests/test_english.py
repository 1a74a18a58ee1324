"""Docstrings begin with a noun phrase or an imperative that stands alone, and some words are not used."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").rglob("*.py")])
OPENINGS = re.compile(
    r"(What|Who|How|Where|Which|When|Why|Of|There (is|are))\b"
    r"|(Is|Are|Was|Were|Does|Do|Did|Has|Have|Can|May|Must|Should)\b[^.:]*\?"
)
BANNED = re.compile(r"\b(told|(its|their|and) kin|afresh|so many)\b", re.IGNORECASE)


def docstrings(path: Path) -> list[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            found.append((getattr(node, "lineno", 1), text))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_opens_with_something_that_stands_alone(path):
    wrong = [f"line {line}: {text.splitlines()[0]}" for line, text in docstrings(path) if OPENINGS.match(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_word_is_used_that_was_agreed_not_to_be(path):
    lines = path.read_text().splitlines()
    wrong = [f"line {number}: {line.strip()}" for number, line in enumerate(lines, 1) if BANNED.search(line)]
    assert not wrong, "\n".join(wrong)
