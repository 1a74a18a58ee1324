import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .tiny import MODELS, RECIPE


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `tiny.MODELS`, made once."""
    root, made = tmp_path_factory.mktemp("models"), set[str]()

    def folder(name: str) -> Path:
        if name not in made:
            MODELS[name](root / name)
            made.add(name)
        return root / name

    return folder


@pytest.fixture
def recipe_for(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Callable[..., Path]:
    """A recipe file for a tiny model and rows or a file of them; `changes` replace whole lines by their first word."""

    def write(model: str, data: Sequence[dict[str, Any]] | Path, **changes: str) -> Path:
        if not isinstance(data, Path):
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data), encoding="utf-8")
            data = path
        names = {"{model}": json.dumps(str(tiny_model(model))), "{data}": json.dumps(str(data))}
        lines = [changes.get(line.split(" ")[0], line) for line in RECIPE.strip().splitlines()]
        text = "\n".join(lines)
        for name, value in names.items():
            text = text.replace(name, value)
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(text + "\n", encoding="utf-8")
        return recipe

    return write
