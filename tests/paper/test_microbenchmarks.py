"""The toy of Figure 5 against what is known, and syncs that are scaled."""

from dataclasses import replace

import pytest

from fedkseed.paper.experiments import load
from fedkseed.paper.microbenchmarks import MEASURED, gather_costs, gather_syncs, gather_toy, unrestricted
from fedkseed.paper.results import Spread
from fedkseed.paper.tiny_model import make


def silent(text: str) -> None: ...


def test_the_toy_is_one_direction_s_size_at_first_and_that_of_fresh_draws_at_last():
    toy = load("figure-5", "tiny")
    options = toy.options | {"sizes": [1, 4096], "draws": [100], "repetitions": 2, "families": ["gaussian", "hadamard"]}
    rows = {
        (row["family"], row["K"]): row["mean |mean|"] for row in gather_toy(replace(toy, options=options), {}, silent)
    }
    # one coordinate of 10,000: the standard error of a mean of |N(0, 1)| over 20,000 is 0.004
    assert rows["gaussian", 1] == pytest.approx((2 / 3.14159265) ** 0.5, abs=0.02)
    assert rows["hadamard", 1] == 1
    # variance 1/Γ + 1/K − 1/(Γ K): 2.4 % more than that of fresh draws
    for family in ("gaussian", "hadamard"):
        assert rows[family, 4096] == pytest.approx(unrestricted(100) * 1.012, rel=0.03)


@pytest.mark.parametrize("name", ["figure-2", "figure-8"])
def test_syncs_are_measured_and_shown(name):
    experiment = load(name, "tiny")
    options = experiment.options | {"weights": 1 << 14, "timed": 1 << 13, "sizes": [64]}
    experiment = replace(experiment, options=options)
    rows = gather_syncs(experiment, {}, silent)
    assert all(len(row["seconds"]) == 5 and min(row["seconds"]) > 0 for row in rows)
    assert all(row["timed weights"] == 1 << 13 for row in rows)
    table, draw = MEASURED[experiment.output].show(experiment, rows)
    assert [cells["seconds"] for cells in table.rows] == [Spread.of(row["seconds"]) for row in rows]
    assert draw is not None


def test_costs_are_measured_and_shown_in_every_table(tmp_path):
    two = {"model": ["tiny"], "dataset": ["dolly-uneven"], "method": ["fedkseed", "unlimited-seeds"]}
    places = {"model": str(make(tmp_path / "model"))}
    once = load("table-1", "tiny")
    rows = gather_costs(replace(once, axes=two, options=once.options | {"repeats": 2}), places, silent)
    assert all(len(row["step_seconds"]) == len(row["peak_memory"]) == 2 for row in rows)
    for name in ("table-1", "table-3", "figure-14"):
        experiment = replace(load(name, "tiny"), axes=two)
        table, _ = MEASURED[experiment.output].show(experiment, rows)
        assert [row["approach"] for row in table.rows] == ["FedKSeed", "unlimited seeds, both links"]
        seeds, unlimited = table.rows
        assert seeds["trainable"] == unlimited["trainable"] == 139_584
        assert seeds["bytes down"] == seeds["bytes down, back"]
        assert unlimited["bytes down, back"] > 5 * unlimited["bytes down"]
        assert seeds["a step (s)"] == Spread.of(rows[0]["step_seconds"])


def test_the_toy_says_how_much_larger_its_mean_is_than_that_of_any_seed():
    toy = load("figure-5", "tiny")
    row = {"family": "gaussian", "Γ": 100, "K": 1, "mean |mean|": 10 * unrestricted(100), "std": unrestricted(100)}
    table, _ = MEASURED["toy"].show(replace(toy, options=toy.options | {"repetitions": 4}), [row, row | {"std": None}])
    assert [cells["times any seed"] for cells in table.rows] == ["10.000 ± 0.500", "10.000"]
