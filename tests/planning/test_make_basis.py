"""A basis from public text: it captures the gradient that it is made from, and shares its coefficients out."""

import tomllib

import numpy as np
import pytest
import tomli_w
import torch

from fedkseed import FedKSeedError, Pool, hold
from fedkseed.data.batches import Encoded, collate
from fedkseed.data.sources import Example, read
from fedkseed.data.wording import Wording
from fedkseed.models.load import load_model
from fedkseed.models.loss import graph_loss
from fedkseed.planning.make_basis import basis_of, leading, make_basis, quantised, rescaled, shared_out
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.run.progress import Silent
from fedkseed.run.setup import tokenizer_of
from fedkseed.weights.basis_file import load_basis

from ..commands import fedkseed, refused
from ..conftest import CONFIGS, recipe_text
from ..encoding import encode_all
from ..weights.test_streamed import model_of

EXAMPLES = [Encoded(tuple(range(1 + k, 13 + k)), 5, Example("an instruction", "its response")) for k in range(0, 40, 8)]


@pytest.mark.parametrize("config", CONFIGS[:4], ids=lambda config: config.model_type)
def test_a_basis_captures_far_more_of_its_own_gradient_than_random_directions(config):
    shares = {}
    for family in ("separable", "informed"):
        model = model_of(config)
        basis = make_basis(model, ["*"], EXAMPLES, size=256, pad=0)
        assert 200 <= basis.size <= 256
        pool = Pool(1, 256, family, basis.digest() if family == "informed" else b"")
        weights = hold(model, pool, basis=basis)
        slope = np.zeros(256)
        for example in EXAMPLES:
            batch = collate([example], 0)
            slope += weights.gradient(lambda b=batch, m=model: graph_loss(m, b))[1]
        squares = whole_square(model_of(config), EXAMPLES)
        lengths = weights.layout.size if family == "separable" else 1  # ‖z‖²
        shares[family] = float(slope @ slope) / lengths / squares
    assert shares["informed"] > 0.5
    assert shares["informed"] <= 1.02  # orthonormal up to int8
    assert shares["separable"] < 0.2 * shares["informed"]


def whole_square(model, examples) -> float:
    """The square of the norm of the gradient of the examples' losses."""
    parameters = [parameter.requires_grad_(True) for parameter in model.parameters()]
    with torch.enable_grad():
        torch.stack([graph_loss(model, collate([example], 0)) for example in examples]).sum().backward()
    return float(sum((p.grad.double() ** 2).sum() for p in parameters if p.grad is not None))


def test_the_same_examples_give_the_same_basis():
    one, other = (make_basis(model_of(CONFIGS[0]), ["*"], EXAMPLES, size=128, pad=0) for _ in range(2))
    assert one.digest() == other.digest()


def test_tensors_that_are_not_tuned_have_no_factors():
    basis = make_basis(model_of(CONFIGS[0]), ["*mlp*"], EXAMPLES, size=128, pad=0)
    assert basis.factors
    assert all("mlp" in name for name in basis.factors)


def test_ranks_follow_the_energy_that_a_coefficient_captures():
    values = {"a": np.array([10.0, 9.0, 8.0]), "b": np.array([1.0, 0.5]), "c": np.array([3.0])}
    assert shared_out(values, 9, None) == {"a": 3}
    assert shared_out(values, 10, None) == {"a": 3, "c": 1}
    assert shared_out(values, 6, 2) == {"a": 2, "b": 1, "c": 1}  # what is left is too little for another second rank
    assert shared_out(values, 100, None) == {"a": 3, "b": 2, "c": 1}


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (9, 1)])
def test_leading_vectors_are_those_of_the_decomposition(shape):
    g = torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    left, values, right = leading(g)
    np.testing.assert_allclose(values, np.linalg.svd(g.numpy(), compute_uv=False), rtol=1e-5)
    np.testing.assert_allclose(left * values @ right.T, g.numpy(), atol=1e-5)
    np.testing.assert_allclose(left.T @ left, np.eye(len(values)), atol=1e-6)


def test_columns_in_int8_are_right_to_half_a_unit():
    columns = np.linalg.qr(np.random.default_rng(0).normal(size=(50, 4)))[0]
    made, scales = quantised(columns)
    assert made.dtype == np.int8
    assert np.abs(made * scales - columns).max() <= 0.51 * scales.max()


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(FedKSeedError, match="none within the token limit"):
        make_basis(model_of(CONFIGS[0]), ["*"], [], size=64, pad=0)
    broken = model_of(CONFIGS[0])
    next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(FedKSeedError, match="no gradient of the examples is finite"):
        make_basis(broken, ["*"], EXAMPLES, size=64, pad=0)


def test_the_command_writes_a_basis_that_a_run_tunes_along(tmp_path, model_folder, data_file):
    table = tomllib.loads(recipe_text(model_folder, data_file))
    table["directions"] = {"size": 64}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    command = ["basis", tmp_path / "recipe.toml", "--data", data_file, "--output", tmp_path / "basis", "--examples"]
    assert fedkseed(*command, 4).exit_code == 0
    made = load_basis(tmp_path / "basis")
    assert 32 <= made.size <= 64
    assert made.about["examples"] == 4
    assert "exists already" in refused(*command, 4), "a file that exists is kept"
    command[5] = tmp_path / "other"
    assert "900 examples were asked for" in fedkseed(*command, 900).output
    table["directions"] |= {"family": "mixed", "basis": str(tmp_path / "basis")}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    done = fedkseed("run", tmp_path / "recipe.toml", "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert load_recipe(tmp_path / "run" / "recipe.toml").directions.basis_digest == made.digest().hex()


def test_scales_are_the_nearest_product_to_the_inverse_root_of_the_mean_square_slope():
    model = model_of(CONFIGS[0])
    basis = make_basis(model, ["*"], EXAMPLES, size=256, pad=0)
    slopes = np.random.default_rng(1).normal(size=(12, basis.size)) * np.exp(np.linspace(-4, 4, basis.size))
    found, wanted = rescaled(basis, slopes), -0.5 * np.log((slopes**2).mean(0))
    for name, factor in found.factors.items():
        before = basis.factors[name]
        left, right = factor.left_scale / before.left_scale, factor.right_scale / before.right_scale
        logs = np.log(np.outer(left, right).astype(np.float64))
        target = (wanted - wanted.mean())[factor.directions].reshape(factor.ranks)
        error = target - logs  # of a least-squares fit: no row and no column has a mean left
        assert np.abs(error.mean(0)).max() < 1e-5
        assert np.abs(error.mean(1)).max() < 1e-5
        assert factor.left is before.left
        assert factor.right is before.right
    assert found.digest() != basis.digest()


def test_a_direction_without_a_slope_has_a_finite_scale():
    basis = make_basis(model_of(CONFIGS[0]), ["*"], EXAMPLES, size=256, pad=0)
    slopes = np.ones((3, basis.size))
    slopes[:, ::2] = 0
    slopes[:, : 3 * basis.size // 4] = 0  # the median of all is 0, too
    for name, factor in rescaled(basis, slopes).factors.items():
        before = basis.factors[name]
        products = np.outer(factor.left_scale / before.left_scale, factor.right_scale / before.right_scale)
        assert products.max() / products.min() <= 1001  # the root of 10^6
    for nothing in (np.zeros_like(slopes), np.full_like(slopes, np.nan)):
        with pytest.raises(FedKSeedError, match="no example has finite slopes above 0"):
            rescaled(basis, nothing)


def test_along_a_scaled_basis_slopes_are_alike(tmp_path, model_folder, data_file):
    recipe = parse(tomllib.loads(recipe_text(model_folder, data_file)))
    spread = {}
    for scaled in (False, True):
        basis = basis_of(recipe, str(data_file), 8, 1, Silent(), scaled)
        assert ("scaled" in basis.about) == scaled
        model = load_model(recipe.model.name)
        weights = hold(model, Pool(0, basis.size, "informed", basis.digest()), basis=basis)
        tokenizer = tokenizer_of(recipe, Silent())
        batches = [collate([e], 0) for e in encode_all(read(str(data_file)), tokenizer, Wording())[:8]]
        slopes = [weights.gradient(lambda batch=batch, model=model: graph_loss(model, batch))[1] for batch in batches]
        steep = np.log(np.square(slopes).mean(0))
        spread[scaled] = float(np.std(steep))
    assert spread[True] < 0.5 * spread[False]
