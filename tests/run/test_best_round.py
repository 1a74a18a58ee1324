"""The best round by a validation part: chosen, kept, and the same whether a run was stopped in between or not."""

import dataclasses
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedkseed import FedKSeedError
from fedkseed.evaluation.statistics import Evaluation
from fedkseed.recipe.reading import parse
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.recipe.schema import EvaluationTable as Settings
from fedkseed.run import store as storing
from fedkseed.run.best_round import best_round, exhausted
from fedkseed.run.loop import Federation, Result, WithoutModel
from fedkseed.run.store import STOPPED, Store
from fedkseed.run.verify import verify
from fedkseed.weights.adapter import Adapter

from . import synthetic

CHOOSING = """
[evaluation]
every = 1
validation = 0.5
best = "loss"
patience = 2
"""
LOSSES = {0: 5.0, 1: 4.0, 2: 3.0, 3: 3.5, 4: 3.0, 5: 1.0, 6: 0.5}  # not better than after 2 rounds until the fifth


def found(loss: float, choice: float = 0.0) -> dict[str, Any]:
    return {"losses": [9.0], "sets": {"validation": {"losses": [loss], "scores": {"choice": [choice]}}}}


@dataclasses.dataclass(frozen=True)
class Scored(WithoutModel):
    """An evaluator whose validation losses are given; those of the reported part fall from round to round."""

    losses: dict[int, float] = dataclasses.field(default_factory=lambda: LOSSES)

    def evaluate(self, state: Any, what: str, write: bool) -> Evaluation:
        return Evaluation([9.0 - state.round, 9.0], sets={"validation": Evaluation([self.losses[state.round]])})


def federation(recipe: str, losses: dict[int, float], stop: int | None) -> Federation:
    parts = synthetic.federation(recipe, stop=stop)
    return dataclasses.replace(parts, evaluator=Scored(parts.recipe, parts.strategy, losses=losses))


def run(directory: Path, recipe: str, losses: dict[int, float] = LOSSES, stop: int | None = None) -> Result:
    return synthetic.carry_on(directory, recipe, federation(recipe, losses, stop))


@pytest.fixture(scope="module")
def recipe() -> str:
    return synthetic.text() + CHOOSING


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The same run without a choice: all six rounds."""
    directory = tmp_path_factory.mktemp("best") / "whole"
    run(directory, synthetic.text(), {**LOSSES})
    return directory


@pytest.fixture(scope="module")
def early(tmp_path_factory, recipe) -> Path:
    directory = tmp_path_factory.mktemp("best") / "early"
    run(directory, recipe)
    return directory


def adapter_after(rounds: int, directory: Path) -> Path:
    """The tuned model of a run that does as many rounds, and chooses nothing."""
    run(directory, synthetic.text(rounds=f"rounds = {rounds}"))
    return directory / "adapter.safetensors"


@pytest.mark.parametrize(
    ("metric", "evaluations", "best"),
    [
        ("loss", {0: found(3), 2: found(1), 4: found(2)}, 2),
        ("loss", {0: found(3), 2: found(1), 4: found(1)}, 2),  # of equals the first
        ("loss", {0: found(1), 2: found(2)}, 0),  # the base model
        ("loss", {0: found(3), 2: found(math.nan), 4: found(2)}, 4),
        ("choice", {0: found(1, 0.0), 2: found(2, 1.0), 4: found(3, 1.0)}, 2),
        ("loss", {}, None),
        (None, {0: found(3)}, None),
    ],
)
def test_the_best_round_is_that_of_the_metric_on_the_validation_part(metric, evaluations, best):
    settings = Settings(every=2, validation=0.5, best=metric, metrics=["choice"])
    assert best_round(settings, evaluations) == best


@pytest.mark.parametrize(("patience", "ends"), [(1, True), (2, True), (3, False), (None, False)])
def test_a_run_is_over_after_as_many_evaluations_without_a_better_one(patience, ends):
    settings = Settings(every=2, validation=0.5, best="loss", patience=patience)
    reason = exhausted(settings, {0: found(3), 2: found(1), 4: found(2), 6: found(1)})
    assert (reason is not None) == ends
    if reason:
        assert reason.startswith("stopped early after 6 rounds: in 2 evaluations the held-out loss of the validation")
        assert "not better than after 2 rounds" in reason


def test_a_run_that_ends_early_has_the_model_of_its_best_round_to_the_bit(early, whole, recipe, tmp_path):
    store, other = Store(early), Store(whole)
    assert (store.rounds, other.rounds) == (4, 6)
    for done in range(5):
        assert store.row(done).parts[:32] == other.row(done).parts[:32]  # digests of states
    assert store.adapter.read_bytes() == adapter_after(2, tmp_path / "two").read_bytes()
    assert Adapter.load(store.adapter).provenance["rounds"] == 2
    assert store.recall(STOPPED).startswith("stopped early after 4 rounds: in 2 evaluations")
    result = run(early, recipe)
    assert (result.best, result.stopped, len(result.reports)) == (2, store.recall(STOPPED), 4)
    assert (result.before.losses, result.after.losses) == ([9.0, 9.0], [7.0, 9.0])  # of the best round, not the last


def test_without_patience_all_rounds_are_done_and_the_best_of_all_is_the_model(tmp_path, recipe):
    result = run(tmp_path / "run", recipe.replace("patience = 2\n", ""), {**LOSSES, 6: 1.5})
    assert (result.best, result.stopped, Store(tmp_path / "run").rounds) == (5, None, 6)
    adapter = tmp_path / "run" / "adapter.safetensors"
    assert adapter.read_bytes() == adapter_after(5, tmp_path / "five").read_bytes()


@pytest.mark.parametrize("stop", range(5))
def test_a_run_that_was_killed_after_any_round_ends_with_the_same_bits(stop, tmp_path, recipe, early):
    with pytest.raises(synthetic.StoppedError) if stop < 4 else nullcontext():
        run(tmp_path / "run", recipe, stop=stop)
    run(tmp_path / "run", recipe)
    store, other = Store(tmp_path / "run"), Store(early)
    assert store.adapter.read_bytes() == other.adapter.read_bytes()
    assert store.head(4) == other.head(4)
    assert store.evaluations() == other.evaluations()
    assert store.recall(STOPPED) == other.recall(STOPPED)


def test_rolled_back_it_forgets_its_end_and_comes_to_the_same(tmp_path, recipe, early):
    copy = Path(shutil.copytree(early, tmp_path / "run"))
    Store(copy).rollback(3)
    assert Store(copy).recall(STOPPED) is None
    run(copy, recipe)
    assert Store(copy).recall(STOPPED) == Store(early).recall(STOPPED) is not None
    assert (copy / "adapter.safetensors").read_bytes() == (early / "adapter.safetensors").read_bytes()


def test_the_best_state_stays_where_states_have_files(tmp_path, recipe, early, monkeypatch):
    monkeypatch.setattr(storing, "LARGE", 1)
    run(tmp_path / "run", recipe)
    assert {path.name for path in (tmp_path / "run").glob("state-*")} == {f"state-{n}.safetensors" for n in (2, 3, 4)}
    assert (tmp_path / "run" / "adapter.safetensors").read_bytes() == (early / "adapter.safetensors").read_bytes()
    assert verify(Store(tmp_path / "run")).rounds == 4


def test_a_rollback_to_a_round_whose_best_state_is_gone_is_refused(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(storing, "LARGE", 1)
    losses = {0: 5.0, 1: 2.0, 2: 4.0, 3: 1.0, 4: 0.5, 5: 0.4, 6: 0.3}
    run(tmp_path / "run", recipe, losses)
    (tmp_path / "run" / "state-6.safetensors").rename(tmp_path / "run" / "state-2.safetensors")
    with pytest.raises(FedKSeedError, match="no state after 2 rounds any more, or none that it needs to go on"):
        Store(tmp_path / "run").rollback(2)  # the best of three is that after one round


def test_verify_takes_the_best_rounds_adapter_and_no_others(early, tmp_path):
    copy = Path(shutil.copytree(early, tmp_path / "run"))
    assert verify(Store(copy)).rounds == 4
    last = Adapter.load(adapter_after(4, tmp_path / "four")).coefficients
    adapter = Adapter.load(copy / "adapter.safetensors")
    dataclasses.replace(adapter, coefficients=last).save(copy / "adapter.safetensors")
    with pytest.raises(FedKSeedError, match="does not hold the coefficients of the state after 2 rounds"):
        verify(Store(copy))


def test_an_algorithm_that_keeps_weights_can_choose_none(recipe):
    tables = {"model": {"name": "none"}, "training": {"algorithm": "fedavg"}}
    choosing = {"every": 1, "validation": 0.5, "best": "loss"}
    checked_algorithm(parse(tables))
    with pytest.raises(FedKSeedError, match=r"fedavg keeps weights.*\[evaluation\] best is for algorithms whose model"):
        checked_algorithm(parse({**tables, "evaluation": choosing}))
