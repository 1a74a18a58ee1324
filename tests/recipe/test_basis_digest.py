"""A basis on its way through a run: read once, named by its digest everywhere, in the adapter at the end."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import fedkseed
from fedkseed import Adapter, FedKSeedError, Pool, Simulation, resume, start
from fedkseed.cli import app
from fedkseed.models.load import load_model
from fedkseed.planning.pin import pin
from fedkseed.recipe import basis_digest as module
from fedkseed.recipe.basis_digest import with_basis
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.recipe.schema import Recipe
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.weights.basis_file import load_basis, save_basis
from fedkseed.weights.layout import Layout

from ..conftest import recipe_text, small_basis, tiny_llama
from ..run import synthetic

DIGEST = "ab" * 32


@pytest.fixture
def write(tmp_path, model_folder, data_file, basis_file):
    """Write a recipe: of a family, and with further changes."""

    def made(family: str = "informed", basis: Path | None = basis_file, **changes: str) -> Path:
        named = "" if basis is None else f'\nbasis = "{basis}"'
        size = {"separable": 64, "informed": 80, "mixed": 128}[family]
        lines = {"family": f'family = "{family}"{named if family != "separable" else ""}', "size": f"size = {size}"}
        (tmp_path / "recipe.toml").write_text(recipe_text(model_folder, data_file, **(lines | changes)))
        return tmp_path / "recipe.toml"

    return made


def directions(**keys) -> Recipe:
    return parse({"model": {"name": "x"}, "directions": keys})


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"family": "informed"}, "takes its directions from a basis: make one with `fedkseed basis`"),
        ({"family": "mixed", "size": 64}, "takes its directions from a basis"),
        ({"family": "hadamard", "basis": "b"}, "the family hadamard has no basis: leave basis and basis_digest out"),
        ({"family": "separable", "basis_digest": DIGEST}, "the family separable has no basis"),
        ({"family": "informed", "basis_digest": "ab"}, "basis_digest: string should match pattern"),
        ({"family": "separable", "size": 128}, "a power of four"),
        ({"family": "mixed", "size": 80, "basis": "b"}, "a power of two"),
    ],
)
def test_a_basis_goes_with_its_families_alone(keys, match):
    with pytest.raises(FedKSeedError, match=match):
        directions(**keys)


def test_a_mode_that_makes_no_weights_is_for_outer_products():
    keys = {"directions": {"family": "hadamard"}, "model": {"name": "x", "mode": "factored"}}
    with pytest.raises(FedKSeedError, match=r"mode = 'factored' is for directions that are outer products, .*hadamard"):
        parse(keys)
    assert parse({**keys, "directions": {"family": "separable"}}).model.mode == "factored"


def test_a_pool_has_the_digest_of_the_file_or_of_the_recipe(write, basis_file):
    recipe = load_recipe(write())
    with pytest.raises(FedKSeedError, match="basis_digest is missing"):
        _ = recipe.pool
    named, basis = with_basis(recipe)
    assert named.pool.basis == load_basis(basis_file).digest() == basis.digest()
    assert with_basis(named)[0] == named
    without = directions(family="informed", size=80, basis_digest=DIGEST)
    assert with_basis(without) == (without, None)
    assert without.pool.basis.hex() == DIGEST


def test_another_file_than_the_recipe_says_is_refused(write):
    recipe = load_recipe(write(size=f'size = 80\nbasis_digest = "{DIGEST}"'))
    with pytest.raises(FedKSeedError, match=rf"basis_digest is {DIGEST}, the basis .* has [0-9a-f]{{64}}"):
        with_basis(recipe)
    with pytest.raises(FedKSeedError, match="No such file"):
        with_basis(directions(family="informed", basis="/none"))


def test_the_path_becomes_absolute_as_others_do(tmp_path, monkeypatch, basis_file):
    monkeypatch.chdir(basis_file.parent)
    assert directions(family="informed", basis=basis_file.name).absolute().directions.basis == str(basis_file)
    assert directions(family="informed", basis="nowhere").absolute().directions.basis == "nowhere"
    assert directions(family="hadamard").absolute().directions.basis is None


def test_pin_writes_the_digest(write, basis_file):
    path, digest = write(), load_basis(basis_file).digest().hex()
    found = pin(path)
    assert found["directions"] == {"basis_digest": digest}
    assert load_recipe(path).directions.basis_digest == digest
    again = small_basis(tiny_llama(), seed=6)
    save_basis(again, path.parent / "again.safetensors")
    path.write_text(path.read_text().replace(str(basis_file), str(path.parent / "again.safetensors")))
    assert pin(path)["directions"] == {"basis_digest": again.digest().hex()}


@pytest.mark.parametrize("family", ["separable", "informed", "mixed"])
@pytest.mark.parametrize("algorithm", ["fedkseed", "fedkseed-pro", "fedkseed-plus", "fedkseed-backprop"])
def test_algorithms_of_k_numbers_tune_a_model(write, tmp_path, family, algorithm):
    path = write(family, algorithm=f'algorithm = "{algorithm}"', rounds="rounds = 2")
    result = start(load_recipe(path), tmp_path / "run")
    adapter = Adapter.load(tmp_path / "run" / "adapter.safetensors")
    assert np.abs(adapter.coefficients).max() > 0
    assert result.digest == adapter.tuned
    verdict = verify(Store(tmp_path / "run"))
    assert verdict.rounds == 2
    # the file alone, on another machine: the same weights, made by the definition
    model = load_model(load_recipe(path).model.name, "float32", "dense", "cpu")
    adapter.apply(model)
    assert Layout(model).digest().hex() == result.digest


@pytest.mark.parametrize("changes", [{"storage": "Q8_0"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("family", ["separable", "mixed"])
def test_models_of_other_types_are_tuned(write, tmp_path, family, changes):
    ((key, value),) = changes.items()
    path = write(family, rounds="rounds = 1")
    path.write_text(path.read_text().replace("[data]", f'{key} = "{value}"\nmode = "factored"\n[data]'))
    result = start(load_recipe(path), tmp_path / "run")
    assert np.isfinite(result.after.losses).all()
    assert result.digest == Adapter.load(tmp_path / "run" / "adapter.safetensors").tuned


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [("fedmezo", True), ("fedzo", True), ("unlimited-seeds", True), ("decomfl", True), ("evofed", True),
     ("ferret", True), ("uplink-seeds", True), ("fedavg", False), ("fedit", False)],
)  # fmt: skip
def test_algorithms_with_other_pools_refuse_and_those_without_directions_do_not(write, algorithm, refused):
    path = write(algorithm=f'algorithm = "{algorithm}"')
    if refused:
        with pytest.raises(FedKSeedError, match=rf"{algorithm} makes its directions from other pools.*'informed'"):
            load_recipe(path)
        return
    with closing(Simulation(load_recipe(path))) as made:
        made.round(made.strategy.server.init())


@pytest.mark.parametrize("family", ["informed", "mixed"])
def test_a_run_that_was_killed_goes_on_to_the_same_digest(write, tmp_path, monkeypatch, family):
    recipe = load_recipe(write(family))
    whole = start(recipe, tmp_path / "whole")
    synthetic.start_and_stop(recipe, tmp_path / "killed", monkeypatch, rounds=2)
    assert Store(tmp_path / "killed").load_recipe().directions.basis_digest is not None
    assert resume(tmp_path / "killed").digest == whole.digest


def test_a_run_does_not_go_on_with_another_basis(write, tmp_path):
    mine = tmp_path / "mine.safetensors"
    save_basis(small_basis(tiny_llama()), mine)
    start(load_recipe(write(basis=mine)), tmp_path / "run")
    save_basis(small_basis(tiny_llama(), seed=6), mine)
    with pytest.raises(FedKSeedError, match=r"basis_digest is .*, the basis .* has"):
        resume(tmp_path / "run")


def test_a_basis_is_read_once(write, tmp_path, monkeypatch, basis_file):
    read = []
    monkeypatch.setattr(module, "load_basis", lambda path: read.append(path) or load_basis(path))
    start(load_recipe(write(rounds="rounds = 1")), tmp_path / "run")
    assert read == [basis_file]


def test_processes_side_by_side_find_the_same(write, tmp_path):
    alone = start(load_recipe(write(rounds="rounds = 1", cohort="cohort = 2\nthreads = 1")), tmp_path / "alone")
    path = write(rounds="rounds = 1", cohort="cohort = 2\nthreads = 1\nat_once = 2")
    assert start(load_recipe(path), tmp_path / "both").digest == alone.digest


def test_verify_needs_neither_model_nor_basis(write, tmp_path):
    mine, run = tmp_path / "mine.safetensors", tmp_path / "run"
    save_basis(small_basis(tiny_llama()), mine)
    start(load_recipe(write(basis=mine)), run)
    mine.unlink()
    assert verify(Store(run)).rounds == 3


def test_commands_about_runs_read_one(write, tmp_path):
    path, run = write(evaluation="[evaluation]\nevery = 1", rounds="rounds = 2"), tmp_path / "run"
    text = tmp_path / "tuned.toml"
    for words in (
        ["run", path, "--output", run],
        ["rounds", run],
        ["verify", run],
        ["report", run, "--output", tmp_path / "report.html"],
        ["export", run, tmp_path / "exported"],
        ["tune", path, "--minutes", "0", "--output", text],
        ["compare", path, "--algorithm", "fedkseed", "--algorithm", "fedmezo"],
    ):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 0, (words, done.output)
    assert load_recipe(text).directions.basis == load_recipe(path).directions.basis


def test_a_model_of_ones_own_is_tuned_along_informed_directions():
    model = tiny_llama()
    basis = small_basis(model)
    batches = [[np.arange(8).reshape(1, -1)], [np.arange(3, 11).reshape(1, -1)]]

    def loss(module: nn.Module, batch: np.ndarray):
        import torch

        ids = torch.from_numpy(batch)
        return module(input_ids=ids, labels=ids).loss

    pool = Pool(1, basis.size, "informed", basis.digest())
    tuned = fedkseed.tune(model, loss, batches, rounds=2, steps=3, lr=1e-3, pool=pool, basis=basis, tuned="*")
    assert Layout(model).digest().hex() == tuned.adapter.tuned
    assert tuned.adapter.basis is basis
    with pytest.raises(FedKSeedError, match="needs its basis"):
        fedkseed.tune(tiny_llama(), loss, batches, rounds=1, pool=pool, tuned="*")


def test_a_run_says_with_which_basis_it_began(write, tmp_path, basis_file):
    start(load_recipe(write(rounds="rounds = 1")), tmp_path / "run")
    identity = Store(tmp_path / "run").recall("identity")["directions"]
    assert f"basis={load_basis(basis_file).digest().hex()}" in identity
    assert str(Pool(3, 64)) == "Pool(key=3, size=64, family='hadamard')"  # in runs of earlier releases
