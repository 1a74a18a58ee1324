"""The attacks of benchmarks/privacy.py: bounds against their definitions, and what each must and must not find."""

import json
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import beta

from fedkseed.secure.accounting import epsilon_of

from . import FOLDER

sys.path.insert(0, str(FOLDER))  # a benchmark is a script, not a module

import privacy


def found_by(capsys, monkeypatch, *arguments: str) -> list[dict]:
    """The rows that a command prints."""
    monkeypatch.setattr(sys, "argv", ["privacy.py", *arguments, "--json"])
    privacy.main()
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize(("guesses", "right"), [(10, 7), (6, 6), (9, 1), (4, 0)])
def test_the_p_value_is_that_of_its_theorem_in_exact_fractions(guesses, right):
    share, delta, canaries = Fraction(3, 4), Fraction(1, 1000), 20  # e^ε = 3
    chance = [math.comb(guesses, b) * share**b * (1 - share) ** (guesses - b) for b in range(guesses + 1)]
    alpha = max([sum(chance[right - i : right]) / Fraction(i) for i in range(1, right + 1)], default=Fraction(0))
    expected = min(Fraction(1), sum(chance[right:]) + 2 * delta * canaries * alpha)
    assert privacy.p_value(canaries, guesses, right, math.log(3), float(delta)) == pytest.approx(float(expected))


@pytest.mark.parametrize(("guesses", "right"), [(100, 100), (400, 300), (1000, 620)])
def test_without_delta_the_bound_is_the_interval_of_clopper_and_pearson(guesses, right):
    share = beta.ppf(0.05, right, guesses - right + 1)
    found = privacy.bound(1000, guesses, right, 0.0, 0.05)
    assert found == pytest.approx(math.log(share / (1 - share)), abs=1e-6)
    assert privacy.bound(1000, guesses, right, 1e-5, 0.05) < found  # δ explains some of the right guesses


def test_guesses_that_are_right_half_of_the_time_refute_nothing():
    assert privacy.bound(1000, 400, 200, 1e-5, 0.05) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("epsilon", "rounds"), [(1.0, 1500), (8.0, 300)])
def test_an_audit_refutes_halved_noise_and_missing_clipping_and_nothing_else(epsilon, rounds):
    found = {
        fault: privacy.many_rounds(privacy.with_fault(privacy.private(epsilon, 16), fault), rounds)
        for fault in ("as built", "noise halved", "no clipping")
    }
    assert found["as built"] <= epsilon
    assert found["noise halved"] > epsilon
    assert found["no clipping"] > epsilon


def test_faults_are_of_the_size_that_their_names_say():
    strategy = privacy.private(2.0, 4096)
    noise = {
        fault: math.sqrt(changed.variance(grid)) * grid.step
        for fault in ("as built", "noise halved", "no clipping")
        for changed in [privacy.with_fault(strategy, fault).aggregator]
        for grid in [changed.grid(4096)]
    }
    # In units of the norm; the analytic Gaussian mechanism finds the stated epsilon in it. Rounding adds 0.05 %.
    assert epsilon_of(noise["as built"], 1, privacy.DELTA) == pytest.approx(2, rel=1e-3)
    assert noise["noise halved"] == pytest.approx(noise["as built"] / 2, rel=1e-4)
    assert noise["no clipping"] == pytest.approx(noise["as built"], rel=1e-4)


def test_one_round_with_many_canaries_is_enough_for_large_faults(capsys, monkeypatch):
    small = ("--epsilons", "2", "--canaries", "400", "--size", "512", "--rounds", "400", "--small", "16")
    rows = {row["code"]: row for row in found_by(capsys, monkeypatch, "audit", *small)}
    assert list(rows) == ["as built", "noise halved", "no clipping"]
    assert {row["stated epsilon"] for row in rows.values()} == {"2"}
    assert rows["as built"]["found"] == "no"
    assert 0 < rows["as built"]["at least, by one round"] < 2
    assert rows["no clipping"]["at least, by one round"] > 2
    assert rows["no clipping"]["found"] == "yes"


def test_the_area_is_the_share_of_pairs_in_the_right_order():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 40) + 1.0, rng.integers(0, 9, 70).astype(float)
    pairs = np.sign(inside[:, None] - outside).mean() / 2 + 0.5
    found, error = privacy.area(inside, outside)
    assert found == pytest.approx(pairs)
    drawn = [privacy.area(rng.choice(inside, 40), rng.choice(outside, 70))[0] for _ in range(500)]
    assert error == pytest.approx(np.std(drawn), rel=0.25)  # of a bootstrap, itself known to 3 %


def test_masks_hide_uploads_but_not_scalars_along_directions_that_one_client_drew(
    capsys, monkeypatch, model_folder, data_file
):
    small = ("--model", str(model_folder), "--data", str(data_file), "--held-out", "capital", "--tokens", "200")
    small += ("--clients", "4", "--steps", "20", "--size", "512", "--only", "scalars", "shared", "dense")
    rows = found_by(capsys, monkeypatch, "members", *small)
    area = {row["what the server has"]: float(row["AUC"]) for row in rows}
    error = {row["what the server has"]: float(row["±"]) for row in rows}
    assert area["scalars of one client, batch 1"] > 0.9
    own, shared = "sum of 4 clients' scalars, own directions", "sum of 4 clients' scalars, shared directions"
    assert area[f"{own}, masked"] > 0.8  # 80 draws of 512 directions: 86 % are drawn once
    assert area[f"{shared}, masked"] < area[f"{own}, masked"]
    noisy = [kind for kind in area if "epsilon 2" in kind]
    assert len(noisy) == 6
    for kind in noisy:
        assert abs(area[kind] - 0.5) < 4 * error[kind], kind
    assert area["K numbers of one client, 5 steps of 4"] > 0.7  # its three rows are all that its numbers are made of
    assert {row["members"] for row in rows if "K numbers" in row["what the server has"]} == {4 * 3}
