"""Divergence: a rise of the training loss is a suspicion, the held-out loss decides, and a run ends where it did."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from fedkseed.evaluation.statistics import Evaluation
from fedkseed.network.protocol.networked_recipe import recipe_for_clients, with_network_defaults
from fedkseed.recipe.reading import parse, tables
from fedkseed.run.best_round import diverged, lowers_loss, lowest_round, suspicious
from fedkseed.run.loop import Federation, Result, WithoutModel, work
from fedkseed.run.store import STOPPED, Store
from fedkseed.run.verify import verify
from fedkseed.weights.adapter import Adapter

from . import synthetic

BASE = [2.0, 3.0, 4.0, 5.0]


def after(*rises: float, base: list[float] | None = None) -> dict[int, dict[str, Any]]:
    """Evaluations every second round whose losses are higher than the base model's; not all by the same."""
    base = BASE if base is None else base
    noise = (-0.1, 0.1, 0.1, -0.1)
    found = {0: {"losses": base}}
    for k, rise in enumerate(rises, 1):
        found[2 * k] = {"losses": [loss + rise + by for loss, by in zip(base, noise, strict=True)]}
    return found


@pytest.mark.parametrize(
    ("evaluations", "sign"),
    [
        ({}, None),
        (after(), None),
        (after(-0.2, -0.5), None),
        (after(0.5), None),  # once may be chance
        (after(0.5, 0.6), "after 4 rounds the held-out loss is 4.1000, 0.6000 ± 0.0577 above the base model's"),
        (after(0.5, 0.15), None),  # within three errors of 0.058
        (after(0.15, 0.5), None),
        ({k: {"losses": [loss + 0.09 * (k > 0) for loss in BASE]} for k in (0, 2, 4)}, None),  # small, without error
        ({k: {"losses": [loss + 0.11 * (k > 0) for loss in BASE]} for k in (0, 2, 4)}, "after 4 rounds"),
        (after(0.5, -0.1, 0.5), None),
        (after(-0.5, 0.2, 0.2), "after 6 rounds"),
        (after(math.nan), "after 2 rounds the held-out loss is nan"),
        (after(0.1, math.inf), "after 4 rounds the held-out loss is inf"),
        (after(0.5, 0.5, base=[math.nan, 1.0, 1.0, 1.0]), None),  # nothing to compare with
    ],
)
def test_two_evaluations_three_errors_above_the_base_model_are_divergence(evaluations, sign):
    found = diverged(evaluations)
    assert (found is None) if sign is None else (found or "").startswith(sign)


@pytest.mark.parametrize(
    ("losses", "evaluated", "is_it"),
    [
        ([], 0, False),
        ([3.0, 3.6, 3.6], 0, False),  # the first of the three is the start itself
        ([3.0, 3.6, 3.6, 3.6], 0, True),
        ([3.0, 3.6, 3.4, 3.6], 0, False),
        ([3.0, 3.6, 3.6, 3.6, 3.6], 4, False),  # looked at a round ago
        ([3.0, 3.6, 3.6, 3.6, 3.6, 3.6, 3.6], 4, True),
        ([3.0, None, math.nan, 9.0], 0, True),
        ([None, None, None, None], 0, False),  # masked uploads say nothing
        ([3.0, 2.0, 1.0, 0.5], 0, False),
    ],
)
def test_three_rounds_half_a_nat_above_the_first_are_a_suspicion(losses, evaluated, is_it):
    assert suspicious(losses, evaluated) is is_it


@pytest.mark.parametrize(
    ("tables_", "by_loss"),
    [
        ({}, True),
        ({"training": {"objective": "accuracy"}}, False),
        ({"evaluation": {"every": 1, "validation": 0.5, "best": "loss"}}, True),
        ({"evaluation": {"every": 1, "validation": 0.5, "metrics": ["accuracy"], "best": "accuracy"}}, False),
    ],
)
def test_a_higher_loss_is_no_sign_where_another_metric_is_meant(tables_, by_loss):
    assert lowers_loss(parse({"model": {"name": "x"}, **tables_})) is by_loss
    assert diverged(after(0.5, 0.6), False) is None
    assert diverged(after(math.nan), False) is not None


def test_the_lowest_round_is_the_first_of_equals_and_has_a_number_for_a_loss():
    assert lowest_round(after(-0.2, -0.5, -0.5)) == 4
    assert lowest_round(after(math.nan, 0.5)) == 0


@dataclasses.dataclass(frozen=True)
class Worse(WithoutModel):
    """An evaluator whose losses fall in the first two rounds, and rise from then on."""

    def evaluate(self, state: Any, what: str, write: bool) -> Evaluation:
        rise = -0.1 * state.round if state.round <= 2 else 0.2 * state.round
        return Evaluation([loss + rise for loss in BASE])


def worse(recipe: str, stop: int | None = None) -> Federation:
    parts = synthetic.federation(recipe, stop=stop)
    return dataclasses.replace(parts, evaluator=Worse(parts.recipe, parts.strategy))


def run(directory: Path, recipe: str, stop: int | None = None) -> Result:
    return synthetic.carry_on(directory, recipe, worse(recipe, stop))


def test_a_run_that_was_killed_ends_at_the_same_round_with_the_same_model(tmp_path):
    recipe = synthetic.text() + "[evaluation]\nevery = 1\n"
    result = run(tmp_path / "whole", recipe)
    whole = Store(tmp_path / "whole")
    assert (result.diverged, result.best, whole.rounds, whole.tuned) == (True, 2, 4, 2)
    assert "The model after 2 rounds is kept" in (result.stopped or "")
    assert Adapter.load(whole.adapter).provenance["rounds"] == 2
    assert verify(whole).rounds == 4
    for stop in range(4):
        with pytest.raises(synthetic.StoppedError):
            run(tmp_path / str(stop), recipe, stop)
        again, store = run(tmp_path / str(stop), recipe), Store(tmp_path / str(stop))
        assert (again.stopped, again.best) == (result.stopped, 2)
        assert store.adapter.read_bytes() == whole.adapter.read_bytes()


def test_rollback_takes_the_end_back(tmp_path):
    run(tmp_path / "run", synthetic.text() + "[evaluation]\nevery = 1\n")
    store = Store(tmp_path / "run")
    with store.locked():
        store.rollback(3)
    assert (store.tuned, store.recall(STOPPED)) == (None, None)


def test_a_run_that_may_not_stop_does_all_rounds_and_keeps_the_last_model(tmp_path):
    result = run(tmp_path / "run", synthetic.text() + "[evaluation]\nevery = 1\nstop_when_diverged = false\n")
    store = Store(tmp_path / "run")
    assert (result.diverged, result.best, result.stopped, store.rounds) == (False, None, None, synthetic.ROUNDS)
    assert Adapter.load(store.adapter).provenance["rounds"] == synthetic.ROUNDS


def test_without_evaluations_between_rounds_a_suspicion_makes_them(tmp_path, monkeypatch):
    recipe, rising = synthetic.text(rounds="rounds = 12"), iter(range(100))
    parts = worse(recipe)

    def round_(*given: Any) -> tuple[Any, Any]:
        after, report = parts.round(*given)
        return after, dataclasses.replace(report, loss=3.0 + next(rising))

    with Store.create(tmp_path / "run", recipe) as store:
        result = work(store, dataclasses.replace(parts, round=round_))
    assert sorted(store.evaluations()) == [0, 4, 7]  # after three rounds that are higher than the first, and three more
    assert (result.diverged, result.best, store.rounds) == (True, 0, 7)
    assert "The base model is kept" in (result.stopped or "")


def test_a_server_warns_unless_its_recipe_says_otherwise_and_clients_are_not_asked():
    table = {"model": {"name": "x"}, "clients": {"split": "files", "cohort": 3}}
    assert parse(table).evaluation.stop_when_diverged
    assert not with_network_defaults(parse(table)).evaluation.stop_when_diverged
    own = with_network_defaults(parse({**table, "evaluation": {"stop_when_diverged": True}}))
    assert own.evaluation.stop_when_diverged
    sent = {recipe_for_clients(recipe, 3) for recipe in (own, with_network_defaults(parse(table)))}
    assert len(sent) == 1
    assert parse(tables(sent.pop())).evaluation.stop_when_diverged
