"""Scores of an earlier run: the base model is not scored twice on the same rows, and nothing else changes."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedkseed.paper.experiments import merge
from fedkseed.recipe.reading import parse
from fedkseed.recipe.schema import Recipe
from fedkseed.run.setup import WithModel
from fedkseed.run.start_and_resume import base_scores, start
from fedkseed.run.store import Store

from ..conftest import recipe_text

OWN_WEIGHTS = ("fedkseed", "fedkseed-plus", "fedkseed-backprop", "fedavg", "fedzo")


@pytest.fixture
def scored(monkeypatch) -> list[str]:
    """What was scored, in order."""
    done: list[str] = []
    whole = WithModel.evaluate

    def evaluate(self: WithModel, state: Any, what: str, write: bool) -> Any:
        done.append(what)
        return whole(self, state, what, write)

    monkeypatch.setattr(WithModel, "evaluate", evaluate)
    return done


@pytest.fixture
def base(model_folder, data_file) -> dict[str, Any]:
    """The tables of a recipe of one round of two clients."""
    table = tomllib.loads(recipe_text(model_folder, data_file))
    table["training"] = {"algorithm": "fedkseed", "rounds": 1, "steps": 2, "batch_size": 2}
    return table


def of(base: dict[str, Any], algorithm: str, **parts: Any) -> Recipe:
    return parse(merge(merge(base, {"training": {"algorithm": algorithm}}), parts))


def lines(directory: Path) -> list[dict[str, Any]]:
    """What a run measured, without seconds."""
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in found]


def test_methods_that_tune_the_model_s_own_weights_have_one_score_of_the_base_model_bit_for_bit(base, tmp_path, scored):
    start(of(base, "fedkseed"), tmp_path / "first")
    assert len(scored) == 2
    for algorithm in OWN_WEIGHTS:
        start(of(base, algorithm), tmp_path / algorithm / "alone")
        scored.clear()
        start(of(base, algorithm), tmp_path / algorithm / "after", earlier=[tmp_path / "first"])
        assert scored == ["held-out examples, round 1"]
        alone, after = (Store(tmp_path / algorithm / name) for name in ("alone", "after"))
        assert alone.evaluations() == after.evaluations()
        assert lines(alone.directory) == lines(after.directory)


def test_what_a_run_begins_with_has_to_be_equal(base, tmp_path):
    start(of(base, "fedkseed"), tmp_path / "first")
    identity = Store(tmp_path / "first").recall("identity")

    def found(recipe: Recipe, **changed: str) -> bool:
        return base_scores(recipe.absolute(), identity | changed, [tmp_path / "first"]) is not None

    mine = Store(tmp_path / "first").load_recipe()
    assert found(mine)
    assert found(mine, directions="Pool of another kind")
    assert not found(mine, **{"data of digest": "0" * 64})
    assert not found(mine, **{"a base model of digest": "0" * 64})
    for table, key, value in [("evaluation", "generated", 1), ("data", "max_tokens", 150), ("clients", "count", 3)]:
        part = getattr(mine, table)
        assert not found(mine.model_copy(update={table: part.model_copy(update={key: value})}))
    assert not found(mine.model_copy(update={"seed": mine.seed + 1}))


def test_adapters_are_part_of_the_base_model_of_their_own_algorithm_alone(base, tmp_path, scored):
    start(of(base, "fedit"), tmp_path / "first")
    scored.clear()
    start(of(base, "fedit", training={"lr": 1e-2}), tmp_path / "second", earlier=[tmp_path / "first"])
    assert len(scored) == 1
    start(of(base, "fedit-sgd"), tmp_path / "third", earlier=[tmp_path / "first", tmp_path / "second"])
    assert len(scored) == 3


def test_a_run_that_cannot_be_read_or_has_no_score_yet_is_passed_over(base, tmp_path, scored):
    start(of(base, "fedkseed"), tmp_path / "first")
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "recipe.toml").write_text("seed = ")
    begun = tmp_path / "begun"
    with Store.create(begun, (tmp_path / "first" / "recipe.toml").read_text()):
        pass
    runs = [tmp_path / "missing", tmp_path / "empty", tmp_path / "damaged", begun]
    scored.clear()
    start(of(base, "fedkseed"), tmp_path / "second", earlier=runs)
    assert len(scored) == 2
    start(of(base, "fedkseed"), tmp_path / "third", earlier=[*runs, tmp_path / "first"])
    assert len(scored) == 3
