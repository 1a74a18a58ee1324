"""The range test: eps against known noise and true derivatives, learning rates against known curves and real rounds."""

import json
import math
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedkseed import FedKSeedError, Simulation, load_recipe, project
from fedkseed.evaluation.statistics import Estimate
from fedkseed.models.load import load_model
from fedkseed.models.loss import graph_loss
from fedkseed.planning.tune import (
    LOST,
    MAX_TRIALS,
    RATE_FACTOR,
    Bench,
    Trial,
    Tuning,
    limits,
    rates,
    search,
    shorten,
    try_rates,
    tune,
)
from fedkseed.recipe.reading import parse
from fedkseed.recipe.schema import Recipe
from fedkseed.report.tables import print_tuning, tuning_table
from fedkseed.run.eps_ladder import LADDER, Rung, Scalars, judge, measure
from fedkseed.weights.layout import Layout

from ..commands import fedkseed, refused
from ..conftest import recipe_text, rows


@pytest.fixture
def recipe(recipe_file) -> Recipe:
    return load_recipe(recipe_file)


def training(recipe: Recipe, **changes: object) -> Recipe:
    return parse(recipe.model_dump(exclude_none=True) | {"training": {**recipe.training.model_dump(), **changes}})


def in_type(recipe: Recipe, dtype: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def losses(noise: float, slope: float, curvature: float, cubic: float, samples: int = 100) -> np.ndarray:
    """Of L(w + tz) = 2 + slope t + curvature t²/2 + cubic t³, each rounded by `noise`."""
    eps, rng = np.array(LADDER), np.random.default_rng(0)
    exact = [2 + slope * t + curvature * t**2 / 2 + cubic * t**3 for t in (eps, -eps, 0 * eps)]
    noisy = np.stack(exact, -1) + noise * rng.normal(size=(samples, eps.size, 3))
    noisy[..., 2] = noisy[:, :1, 2]  # the loss at w is computed once
    return noisy


def tuned_by_command(recipe_file: Path, output: Path, *options: object) -> tuple[str, Recipe]:
    """What `fedkseed tune` says, and the recipe that it writes."""
    ran = fedkseed("tune", recipe_file, "--minutes", 60, "--output", output, *options)
    assert ran.exit_code == 0, ran.output
    return ran.output, load_recipe(output)


# eps


@pytest.mark.parametrize("noise", [1e-7, 1e-4])
def test_rounding_bias_and_curvature_of_known_losses_are_found(noise):
    found = judge(losses(noise, slope=3.0, curvature=4000.0, cubic=1000.0))
    assert found.rounding == pytest.approx(noise, rel=0.2)
    assert found.curvature.mean == pytest.approx(4000, abs=5 * found.curvature.error + 1)
    assert found.square == pytest.approx(9, rel=0.05)
    for rung in found.rungs:
        assert rung.noise == pytest.approx(noise / math.sqrt(2) / rung.eps, rel=0.2)
        if 1000 * rung.eps**2 > 10 * rung.noise:
            assert rung.bias == pytest.approx(1000 * rung.eps**2, rel=0.1)
    errors = [math.hypot(noise / math.sqrt(2) / eps, 1000 * eps**2) for eps in LADDER]
    assert found.eps == LADDER[int(np.argmin(errors))]
    assert found.usable == [eps for eps, error in zip(LADDER, errors, strict=True) if error < 0.3]


def test_one_point_has_the_bias_of_the_curvature():
    found = judge(losses(1e-7, slope=3.0, curvature=200.0, cubic=0.0), points=1)
    for rung in found.rungs:
        assert rung.noise == pytest.approx(math.sqrt(2) * 1e-7 / rung.eps, rel=0.2)
        if rung.eps >= 1e-3:
            assert rung.bias == pytest.approx(100 * rung.eps, rel=0.1)
    two = judge(losses(1e-7, slope=3.0, curvature=200.0, cubic=0.0))
    assert found.best.eps < two.best.eps


def test_noise_that_hides_every_scalar_gives_no_eps():
    found = judge(losses(1.0, slope=3.0, curvature=0.0, cubic=0.0, samples=4))
    assert found.eps is None
    assert found.usable == []


def test_a_model_that_a_large_eps_breaks_is_judged_without_it():
    broken = losses(1e-7, slope=3.0, curvature=0.0, cubic=1000.0, samples=4)
    broken[1, -1, 0] = math.inf
    found = judge(broken)
    assert [rung.eps for rung in found.rungs] == list(LADDER[:-1])
    assert found.eps == judge(losses(1e-7, 3.0, 0.0, 1000.0, samples=4)).eps
    broken[1, 0, 0] = math.nan
    with pytest.raises(FedKSeedError, match="not finite within eps"):
        judge(broken)


def test_at_the_suggested_eps_scalars_are_the_true_derivatives(recipe):
    simulation = Simulation(recipe)
    found = measure(simulation)
    assert found.eps is not None
    model = load_model(recipe.model.name)
    layout = Layout(model)
    gaps: dict[float, list[float]] = {found.eps: [], LADDER[0]: [], LADDER[-1]: []}
    for number in range(4):
        client = simulation.client(number)
        batch = next(client.batches(0))
        model.requires_grad_(True)
        graph_loss(model, batch).backward()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        slopes = sum(project(parameters[entry.name].grad, recipe.pool, tensor=entry.number) for entry in layout.entries)
        model.zero_grad()
        for eps, gap in gaps.items():
            for j in (3, 40):
                above, below = simulation.setup.weights.both(j, eps, partial(client.loss, batch))
                gap.append((above - below) / (2 * eps) - float(np.asarray(slopes)[j]))
    error = {eps: float(np.sqrt(np.mean(np.square(gap)))) for eps, gap in gaps.items()}
    assert error[found.eps] < 0.01 * math.sqrt(found.square)
    assert error[found.eps] < min(error[LADDER[0]], error[LADDER[-1]]) / 2


def test_coarser_weights_ask_for_a_larger_eps(recipe):
    fine, coarse = (measure(Simulation(in_type(recipe, dtype))) for dtype in ("float32", "bfloat16"))
    assert fine.eps is not None
    assert coarse.eps is not None
    assert coarse.eps >= 3 * fine.eps
    assert coarse.rounding > 100 * fine.rounding  # 2⁻⁸ against 2⁻²⁴, averaged over tokens and activations


def test_a_base_model_without_finite_losses_is_refused(recipe, model_folder, tmp_path):
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    named = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(broken)})})
    with pytest.raises(FedKSeedError, match="first batch is nan"):
        tune(named)


# learning rates


def climbed(best: float, own: float, together: float | None = None, lost: float = math.inf) -> Tuning:
    """The trials where loss falls and rises with η as a parabola that is lowest at `best`."""
    found = Tuning(parse({"model": {"name": "none"}}), [0], 1, cohort_limit=together, before=[2.0, 3.0])
    for lr in rates(found, own):
        shape = (lr / best) ** 2 - 2 * lr / best
        found.trials.append(Trial(lr, [] if lr > lost else [2.0 + shape, 3.0 + 1.01 * shape]))
        assert len(found.trials) <= MAX_TRIALS + 2
    return found


@pytest.mark.parametrize("distance", [1e-3, 0.1, 1.0, 10.0, 1e3])
def test_the_best_learning_rate_is_found_from_any_start(distance):
    found = climbed(best=1e-4, own=1e-4 * distance)
    assert found.lr == pytest.approx(1e-4, rel=0.5)
    assert found.worse(max(found.trials, key=lambda trial: trial.lr))


def test_a_gain_that_may_be_luck_is_not_suggested():
    before = [2.0, 2.0, 2.0, 2.0]
    sure, luck = Trial(1e-5, [1.98, 1.99, 1.97, 1.98]), Trial(4e-5, [1.0, 2.1, 1.9, 2.2])
    found = Tuning(parse({"model": {"name": "none"}}), [0], 1, before=before, trials=[sure, luck])
    assert found.best is luck
    assert found.lr == sure.lr
    assert found.alike == [sure.lr, luck.lr]
    assert replace(found, trials=[luck]).lr is None
    assert replace(found, trials=[luck]).suggested == found.recipe


@pytest.mark.parametrize(
    ("algorithm", "seconds", "short"),
    [
        ("fedkseed", 0.1, (3, 2, 24)),
        ("fedkseed", 2.0, (1, 2, 24)),
        ("fedkseed", 1e4, None),
        ("fedkseed-plus", 0.1, (1, 2, 24)),
        ("fedkseed-plus", 3.15, (1, 1, 16)),
        ("fedkseed-plus", 3.5, (1, 1, 8)),
        ("fedkseed-plus", 1e4, None),
    ],
)
def test_trials_of_a_short_search_are_as_long_as_its_time_allows(recipe, algorithm, seconds, short):
    simulation = Simulation(training(recipe, algorithm=algorithm))  # with two clients a round and three steps
    found = search(simulation.recipe, simulation, 30.0, step_seconds=seconds, clock=lambda: 0.0)
    assert (found.spent, bool(found.trials)) == (short is None, short is not None)
    assert short in (None, (found.steps, len(found.cohort), len(found.before)))


def test_a_size_that_fits_is_taken_after_one_that_never_would(recipe):
    found = Tuning(training(recipe, algorithm="fedkseed-plus"), [*range(1000)], 4)
    assert shorten(found, step_seconds=0.1, seconds=20.0) == (16, pytest.approx(16 / 12 * 0.1))
    assert (found.spent, found.steps, found.cohort) == (False, 1, [0, 1])


def test_one_step_that_is_scaled_is_the_round_of_each_rate(recipe):
    simulation = Simulation(training(recipe, algorithm="fedkseed-plus"))
    bench, rounds, settings = Bench(simulation), Bench(simulation), simulation.strategy.settings
    assert settings.derivatives is not None
    of_one_step = replace(settings.derivatives, steps=1)

    def strategy_of(lr: float):
        return simulation.setup.algorithm.strategy_of(replace(settings, derivatives=replace(of_one_step, lr=lr)))

    bench.take_step(strategy_of(3e-4), 3e-4, simulation.cohort(0))
    for lr in (1e-5, 1e-3):
        scaled, own = bench.trial(strategy_of(lr), lr), rounds.trial(strategy_of(lr), lr)
        assert scaled.losses == pytest.approx(own.losses, rel=1e-5)


def test_a_trial_moves_the_model_as_far_as_a_round_after_the_first_ones(recipe):
    """A network's default, [trust] warmup = 3, would quarter a trial's step, and quadruple the rate that is found."""
    found = []
    for warmup in (0, 3):
        trust = {"agreement": True, "warmup": warmup}
        wanted = parse(training(recipe, steps=2).model_dump(exclude_none=True) | {"trust": trust})
        with closing(Simulation(wanted)) as simulation:
            found.append(search(wanted, simulation, 30.0, step_seconds=0.01, clock=lambda: 0.0).trials)
    assert found[0] == found[1] != []


def test_a_clip_is_suggested_that_honest_scalars_hardly_reach():
    rung = Rung(1e-3, 8.0, 0.1, 0.1, 0.01, 0.0)
    found = Tuning(parse({"model": {"name": "none"}}), [0], 1, scalars=Scalars([rung], 0.0, 4, 100.0, Estimate(1, 0)))
    assert found.clip == 80
    assert found.suggested.training.clip == 80
    own = replace(found, recipe=parse({"model": {"name": "none"}, "training": {"clip": 5.0}}))
    assert own.clip is None
    assert own.suggested.training.clip == 5
    signs = parse({"model": {"name": "none"}, "training": {"wire": "sign", "lr": 1e-3}})
    assert replace(found, recipe=signs).clip is None


def test_a_norm_is_suggested_that_clients_changes_hardly_pass(recipe_file, tmp_path):
    recipe_file.write_text(recipe_file.read_text().replace("cohort = 2", "cohort = 4") + "[secure]\n")
    with pytest.raises(FedKSeedError, match=r"\[secure\] norm.*`fedkseed tune` prints one"):
        Simulation(load_recipe(recipe_file))
    printed, found = tuned_by_command(recipe_file, tmp_path / "new.toml")
    assert found.secure is not None
    assert found.secure.norm is not None
    assert f"[secure]\nnorm = {found.secure.norm:g} #" in printed
    with closing(Simulation(found)) as simulation:
        strategy, norms = simulation.strategy, []
        message = strategy.server.broadcast(strategy.server.init())
        for number in range(4):
            client = simulation.client(number)
            strategy.client.sync(message, client.weights)
            norms.append(np.linalg.norm(strategy.client.change(strategy.client.inner.train(message, client))))
    assert found.secure.norm / 8 < min(norms)
    assert max(norms) < 2 * found.secure.norm, "three steps: a change may be somewhat longer"


def test_a_norm_is_suggested_for_noise_by_the_server(recipe_file, tmp_path):
    recipe_file.write_text(recipe_file.read_text() + "[privacy]\nepsilon = 8.0\n")
    with pytest.raises(FedKSeedError, match=r"\[privacy\] norm.*`fedkseed tune` prints it"):
        Simulation(load_recipe(recipe_file))
    printed, tuned = tuned_by_command(recipe_file, tmp_path / "new.toml")
    found = tuned.privacy
    assert found is not None
    assert found.norm is not None
    assert f"[privacy]\nnorm = {found.norm:g} #" in printed
    assert (found.epsilon, found.noise) == (8.0, None)


def test_the_climb_ends_where_the_model_is_lost():
    found = climbed(best=1.0, own=1e-4, lost=0.01)
    assert found.lr is not None
    assert 0.01 / RATE_FACTOR < found.lr <= 0.01
    assert sum(trial.lr > 0.01 for trial in found.trials) <= 2


def test_the_climb_starts_below_the_measured_limit():
    first = climbed(best=1e-4, own=1e-6, together=1e-3).trials[0].lr
    assert first == pytest.approx(1e-6 * RATE_FACTOR**3)
    assert first < 1e-3 / RATE_FACTOR


def test_limits_are_those_of_a_quadratic(recipe):
    """Steps −η ρ z on wᵀw/2 have E[ΔL] = 0 at η = 2 / (d + 2) for gaussian z, 2 / d for signs."""
    simulation = Simulation(recipe)
    sizes = np.array([len(simulation.shares.clients[k]) for k in (0, 1)])
    alone, together = limits(Estimate(50.0, 1.0), 1, simulation, [0, 1])
    assert alone == 2 / 50
    assert together == pytest.approx(alone * sizes.sum() ** 2 / (sizes**2).sum())
    assert limits(Estimate(50.0, 1.0), 3, simulation, [0])[0] == pytest.approx(6 / 50)
    assert limits(Estimate(50.0, 1.0), 1, simulation, [0], size=7.0)[0] == pytest.approx(7 * 2 / 50)  # of signs
    assert limits(Estimate(50.0, 30.0), 1, simulation, [0]) == (None, None)
    w, rng = np.ones(50), np.random.default_rng(0)
    z = rng.choice([-1.0, 1.0], size=(4000, 50))
    changes = [((w - lr * (z @ w)[:, None] * z) ** 2).sum(1).mean() - 50 for lr in (0.8 * alone, 1.2 * alone)]
    assert changes[0] < 0 < changes[1]


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedkseed-plus", "fedavg"])
def test_the_suggested_learning_rate_lowers_the_loss_and_thirty_times_it_does_not(recipe, algorithm):
    recipe = training(recipe, algorithm=algorithm)
    found = tune(recipe, minutes=60, steps=8)
    assert found.lr is not None
    assert (found.eps is None) == (algorithm != "fedkseed")
    bench = Bench(Simulation(recipe))
    before = bench.losses(bench.simulation.strategy.server.init(), "")
    assert before == found.before

    def change(lr: float) -> Estimate:
        changed = training(recipe, lr=lr, eps=found.eps or 1e-3, steps=8)
        rate = changed.derivatives.model_copy(update={"lr": lr})  # where clients that take derivatives look
        if algorithm == "fedkseed-plus":
            changed = changed.model_copy(update={"derivatives": rate})
        simulation = Simulation(changed)
        return Bench(simulation).trial(simulation.strategy, lr).change(before)

    best = change(found.lr)
    assert best.mean == pytest.approx(found.best.change(found.before).mean, rel=1e-6)
    assert best.mean < -2 * best.error
    assert change(30 * found.lr).mean > best.mean + 2 * best.error


@pytest.mark.parametrize("algorithm", ["fedkseed-pro", "fedzo", "decomfl", "evofed", "ferret", "fedit"])
def test_every_trial_starts_from_the_base_model(recipe, algorithm):
    simulation = Simulation(training(recipe, algorithm=algorithm, steps=2))
    bench, strategy, digest = Bench(simulation), simulation.strategy, simulation.setup.weights.digest()
    before = bench.losses(strategy.server.init(), "")
    first, again = (bench.trial(strategy, 1e-3) for _ in range(2))
    assert not first.failure
    assert first == again
    assert first.losses != before
    found = Tuning(simulation.recipe, [0], 1)
    try_rates(simulation, found, until=0.0, clock=iter([1.0]).__next__)
    assert found.spent
    assert found.before == before
    assert simulation.setup.weights.digest() == digest


def test_a_learning_rate_that_loses_the_model_is_a_failure_and_no_error(recipe, monkeypatch):
    simulation = Simulation(recipe)
    bench = Bench(simulation)
    monkeypatch.setattr(bench, "losses", lambda state, what: [2.0, math.nan])
    lost = bench.trial(simulation.strategy, 1.0)
    assert (lost.failure, lost.mean) == ("the loss is not finite", math.inf)

    def refusing(state: object) -> None:
        raise FedKSeedError("round 0 would overflow float32")

    monkeypatch.setattr(simulation, "round", refusing)
    assert "overflow" in bench.trial(simulation.strategy, 1.0).failure


# the whole


def test_measuring_leaves_the_model_as_it_was(recipe):
    simulation = Simulation(recipe)
    digest = simulation.setup.weights.digest()
    measure(simulation)
    assert simulation.setup.weights.digest() == digest
    simulation.setup.load(replace(simulation.strategy.server.init(), coefficients=np.full(64, 1e-3)))
    assert simulation.setup.weights.digest() != digest


def test_held_out_examples_change_nothing_and_training_examples_do(tmp_path, model_folder):
    def tuned(of: str) -> list[list[float]]:
        changed = [row | {"response": "Nothing."} if row["category"] == of else row for row in rows()]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        (tmp_path / "r.toml").write_text(recipe_text(model_folder, tmp_path / "rows.jsonl"))
        found = tune(load_recipe(tmp_path / "r.toml"), minutes=60, steps=1)
        return [found.before, *(trial.losses for trial in found.trials)]

    plain = tuned("none")
    assert tuned("capital") == plain
    assert tuned("colour") != plain


def test_no_trial_is_begun_when_the_time_is_spent(recipe):
    ticks = iter(range(0, 10**6, 20))
    found = tune(recipe, minutes=2, steps=1, clock=lambda: float(next(ticks)))
    assert found.spent
    assert len(found.trials) < 3
    assert tune(recipe, minutes=60, steps=1).spent is False


def test_rates_of_a_recipe_that_protects_examples_are_those_of_clear_steps(recipe_file):
    clear = load_recipe(recipe_file)
    recipe_file.write_text(recipe_file.read_text() + '[privacy]\nunit = "example"\nepsilon = 1.0\nnorm = 1.0\n')
    ticks = [iter(range(0, 10**6, 20)) for _ in range(2)]
    found, expected = (
        tune(one, minutes=2, steps=1, clock=lambda of=of: float(next(of)))
        for one, of in zip((load_recipe(recipe_file), clear), ticks, strict=True)
    )
    assert found.scalars == expected.scalars
    assert found.eps is not None
    assert found.suggested.privacy is not None


def test_the_command_prints_the_lines_and_writes_the_recipe(recipe_file, tmp_path):
    text, output = recipe_file.read_text(), tmp_path / "tuned.toml"
    said, tuned = tuned_by_command(recipe_file, output, "--steps", 8)
    lines, given = said.splitlines(), load_recipe(recipe_file)
    printed = dict(line.split(" #")[0].split(" = ") for line in lines[lines.index("[training]") + 1 :][:2])
    assert (tuned.training.eps, tuned.training.lr) == (float(printed["eps"]), float(printed["lr"]))
    assert tuned.training.lr != given.training.lr
    assert training(tuned, eps=given.training.eps, lr=given.training.lr, clip=None) == given
    assert recipe_file.read_text() == text
    for part in ("mean |rho|", "tr H", "the error is within 10%", "change of the loss", "best"):
        assert part in said


def test_what_was_not_found_stays_and_is_said(recipe_file, tmp_path):
    output = tmp_path / "tuned.toml"
    result = fedkseed("tune", recipe_file, "--minutes", 0, "--output", output)
    assert "the time is spent" in result.output
    assert "lr = 0.001 # unchanged" in result.output
    assert load_recipe(output).training.lr == load_recipe(recipe_file).training.lr


def test_refusals_are_one_line(recipe_file, tmp_path):
    assert "exists already; choose another file" in refused("tune", recipe_file, "--output", recipe_file)
    assert "can't read the recipe" in refused("tune", tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text(recipe_file.read_text().replace('name = "', 'name = "/no'))
    assert "no model at" in refused("tune", tmp_path / "bad.toml")


def test_seeds_decide_alone(recipe):
    torch.manual_seed(1)
    first = measure(Simulation(recipe))
    torch.manual_seed(2)
    assert measure(Simulation(recipe)) == first
    assert measure(Simulation(recipe.model_copy(update={"seed": 4}))) != first


def curved(lr: float, curvature: float, way: float, size: int, **more: object) -> Tuning:
    """What a search found that measured tr H alone."""
    training = {"lr": lr, "wire": "exact", **more}
    recipe = parse({"model": {"name": "none"}, "training": training, "directions": {"size": size}})
    rung = Rung(1e-3, 8.0, 0.1, 0.1, 0.01, 0.0)
    return Tuning(recipe, [0], 1, scalars=Scalars([rung], 0.0, 4, 0.0, Estimate(curvature, 0.0)), weighted_steps=way)


@pytest.mark.parametrize("x", [0.02, 0.2, 1.0, 5.0])
def test_what_few_directions_lose_is_what_steps_in_a_bowl_do(x):
    """Steps −η ρ z along axes of a bowl h |w|² / 2 by turns, beside as many that all fall as the first."""
    size, turns, h = 64, 500, 3.0
    lr = x / (2 * h * turns)
    at = np.ones(size)
    for step in range(turns * size):
        at[step % size] -= lr * h * at[step % size]
    gain, first = np.sum(h / 2 * (1 - at**2)), lr * h**2
    found = curved(lr, h, turns * size, size)
    assert found.lost(size) == pytest.approx(1 - gain / (first * turns * size), abs=2e-3)


@pytest.mark.parametrize(("size", "way", "more"), [(64, 8000, True), (4096, 8000, False), (64, 5, False)])
def test_more_directions_are_suggested_where_the_recipes_own_lose_more_than_a_tenth(size, way, more, capsys):
    found = curved(1e-6, 5e4, way, size)  # x = 800 / K of the longer ways
    assert (found.size is not None) is more
    assert found.suggested.directions.size == (found.size or size)
    if found.enough is not None:
        assert found.lost(found.enough) <= LOST < found.lost(found.enough // 2) or found.enough == 64
    print_tuning(found)
    printed = capsys.readouterr().out
    assert f"K = {size:,} directions lose about {found.lost(size):.0%}" in printed
    assert (f"[directions]\nsize = {found.size} #" in printed) is more
    document = tuning_table(found)
    assert (document["lost"], document["enough"]) == (found.lost(size), found.enough)


@pytest.mark.parametrize("algorithm", ["fedkseed-backprop", "fedit", "decomfl"])
def test_of_algorithms_that_take_no_steps_along_one_of_k_directions_no_loss_is_predicted(algorithm):
    recipe = parse({"model": {"name": "none"}, "training": {"algorithm": algorithm}})
    assert replace(curved(1e-6, 5e4, 8000, 64), recipe=recipe).lost(64) is None
    assert curved(1e-6, 5e4, 8000, 64).lost(64) is not None
    assert curved(1e-6, 5e4, 8000, 64, server="adam", server_lr=3e-6).lost(64) is None
