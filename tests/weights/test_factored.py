"""The engine that makes no weights: losses and derivatives of the model of the definition, and its digest."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig

from fedkseed import FedKSeedError, Pool, hold
from fedkseed.directions.factors import Basis, Factor, Matrix
from fedkseed.local.zeroth_order import zeroth_order_steps
from fedkseed.models.load import load_model
from fedkseed.planning.make_basis import quantised
from fedkseed.weights import factored as engine
from fedkseed.weights import lazy as lazy_module
from fedkseed.weights.factored import FactoredWeights
from fedkseed.weights.layout import Layout
from fedkseed.weights.lazy import Lazy

from ..conftest import CONFIGS, SMALL
from .test_streamed import TOKENS, loss_of, model_of

FAMILIES = ("separable", "informed", "mixed")
TIED = LlamaConfig(**SMALL, intermediate_size=48, tie_word_embeddings=True)


def basis_of(model: torch.nn.Module, rank: int = 2) -> Basis:
    """Orthonormal random factors for every tensor of a model, the output layer's of a higher rank."""
    factors, first, rng = {}, 0, np.random.default_rng(0)
    for name, shape in Layout(model).shapes.items():
        matrix = Matrix.of(shape)
        r = min(rank, matrix.rows, matrix.columns)
        sides = (np.linalg.qr(rng.normal(size=(n, r)))[0] for n in (matrix.rows, matrix.columns))
        (left, left_scale), (right, right_scale) = map(quantised, sides)
        factors[name] = Factor(matrix.rows, matrix.columns, first, left, right, left_scale, right_scale)
        first = factors[name].directions.stop
    return Basis(factors)


def held(family: str, config, dtype=torch.float32, mode: str = "factored"):
    """A model, its weights, and coefficients that change its loss by some per cent."""
    model = model_of(config, dtype)
    basis = basis_of(model) if family != "separable" else None
    size = 256 if basis is None else basis.size if family == "informed" else 1 << (basis.size - 1).bit_length()
    pool = Pool(1, size, family, b"" if basis is None else basis.digest())
    weights = hold(model, pool, mode=mode, basis=basis)
    scale = {"separable": 1e-3, "informed": 0.1, "mixed": 0.1 / np.sqrt(size)}[family]
    weights.load(np.random.default_rng(1).normal(size=size) * scale)
    return model, weights


def graph_of(model):
    logits = model(TOKENS, use_cache=False).logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", [*CONFIGS, TIED], ids=lambda config: config.model_type)
def test_losses_derivatives_and_digest_are_those_of_the_definition(config, family):
    found = {}
    for mode in ("materialized", "factored"):
        model, weights = held(family, config, mode=mode)
        loss = loss_of(model)
        steps = weights.both(3, 1e-2, loss)
        weights.settle()
        value, slope = weights.gradient(partial(graph_of, model))
        found[mode] = loss(), *steps, value, weights.digest(), slope
    (*losses, digest, slope), (*want, of_definition, slope_of_definition) = found["factored"], found["materialized"]
    assert losses == pytest.approx(want, rel=1e-5)
    base = loss_of(model_of(config))()
    assert abs(losses[0] - base) > 2e-4 * base  # the coefficients matter
    assert digest == of_definition
    np.testing.assert_allclose(slope, slope_of_definition, atol=1e-4 * np.abs(slope_of_definition).max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "config",
    [*(config for config in CONFIGS if config.model_type not in ("opt", "gemma", "gemma2")), TIED],
    ids=lambda config: config.model_type,
)
def test_derivatives_of_each_example_are_those_of_a_batch_of_one(config, family):
    model, weights = held(family, config)
    made = weights.made
    losses, slopes = weights.gradients(partial(losses_of, model, TOKENS), len(TOKENS))
    assert slopes.shape == (len(TOKENS), weights.pool.size)
    for k, tokens in enumerate(TOKENS):
        alone, slope = weights.gradient(lambda tokens=tokens: losses_of(model, tokens[None]).mean())
        assert losses[k] == pytest.approx(alone, rel=1e-5)
        np.testing.assert_allclose(slopes[k], slope, atol=1e-5 * np.abs(slope).max())
    assert np.abs(slopes[0] - slopes[1]).max() > 0.1 * np.abs(slopes[0]).max()
    assert weights.made == made


def losses_of(model, tokens):
    logits = model(tokens, use_cache=False).logits.float()
    each = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return each.mean(1)


def test_derivatives_of_each_example_are_refused_where_it_is_not_known_whose_they_are():
    model, weights = held("informed", CONFIGS[0])

    def flat():  # as the experts of a mixture get their tokens
        hidden = model.model(TOKENS, use_cache=False).last_hidden_state
        return model.lm_head(hidden.flatten(0, 1)).float().view(len(TOKENS), -1).sum(1)

    with pytest.raises(FedKSeedError, match="do not say which of 2 examples"):
        weights.gradients(flat, 2)
    with pytest.raises(FedKSeedError, match="expected 2 finite losses, got"):
        weights.gradients(lambda: losses_of(model, TOKENS).mean(), 2)
    assert np.isfinite(loss_of(model)()), "the weights can be used afterwards"
    model, weights = held("informed", next(config for config in CONFIGS if config.model_type == "gemma"))
    with pytest.raises(FedKSeedError, match=r"norm\.weight is used in a way"):  # as 1 + weight.float()
        weights.gradients(lambda: losses_of(model, TOKENS), 2)


def test_gpt2_makes_no_matrix(monkeypatch):
    """Its layers keep their matrices as (inputs, outputs), and call torch.addmm."""
    model, weights = held("informed", CONFIGS[1])
    shapes = []
    whole = engine.FactoredSource.values
    monkeypatch.setattr(
        engine.FactoredSource, "values", lambda self, *of: shapes.append(self.shape) or whole(self, *of)
    )
    weights.both(3, 1e-2, loss_of(model))
    weights.gradient(partial(graph_of, model))
    assert shapes
    assert {len(shape) for shape in shapes} == {1}, "vectors alone are made"


@pytest.mark.parametrize("family", FAMILIES)
def test_16_bit_models_have_the_losses_of_the_definition_up_to_their_rounding(family):
    found = []
    for mode in ("materialized", "factored"):
        model, weights = held(family, CONFIGS[0], torch.bfloat16, mode)
        found.append((loss_of(model)(), *weights.both(3, 0.1, loss_of(model))))
    assert found[0] == pytest.approx(found[1], rel=2**-7)


def test_no_weight_is_made_in_steps_or_derivatives(monkeypatch):
    for family in FAMILIES:
        model, weights = held(family, TIED)
        made = weights.made
        weights.both(3, 1e-2, loss_of(model))
        weights.settle()
        weights.gradient(partial(graph_of, model))
        assert weights.made == made


def test_tensors_that_no_direction_touches_stay_the_models_own():
    model = model_of(TIED)
    whole = basis_of(model)
    name = next(name for name, _ in whole if name.endswith("mlp.up_proj.weight"))
    basis = Basis({name: replace(whole.factors[name], first=0)})
    weights = hold(model, Pool(1, basis.size, "informed", basis.digest()), basis=basis)
    weights.load(np.full(basis.size, 0.5))
    assert [n for n, parameter in model.named_parameters() if isinstance(parameter, Lazy)] == [name]
    made, losses = weights.made, weights.both(0, 1e-2, loss_of(model))
    assert weights.made == made
    assert losses[0] != losses[1]
    other = model_of(TIED)
    written = hold(other, weights.pool, mode="materialized", basis=basis)
    written.load(weights.c)
    weights.settle()
    assert weights.digest() == written.digest()
    assert loss_of(model)() == pytest.approx(loss_of(other)(), rel=1e-6)
    weights.keep()
    assert Layout(model).digest() == written.digest()


@pytest.mark.parametrize("points", [2, 6])
def test_points_of_a_step_share_one_product_with_each_matrix(points, monkeypatch):
    model, weights = held("mixed", CONFIGS[0])
    assert isinstance(weights, FactoredWeights)
    calls = []
    plain = lazy_module.linear

    def counted(x, weight, bias=None):
        calls.append((tuple(weight.shape), x.shape[0]))
        return plain(x, weight, bias)

    monkeypatch.setattr(engine, "linear", counted)
    rng = np.random.default_rng(2)
    rows = [weights.c + rng.normal(size=weights.c.size).astype(np.float32) * np.float32(1e-3) for _ in range(points)]
    losses = weights.points(rows, loss_of(model))
    assert len(calls) == 2 * 7 + 1  # layers' matrices and the output's
    assert {batch for _, batch in calls} == {points * len(TOKENS)}
    for c, loss in zip(rows, losses, strict=True):
        weights.load(c)
        assert loss == pytest.approx(loss_of(model)(), rel=1e-6)


def test_logits_are_made_for_one_point_at_a_time(monkeypatch):
    model, weights = held("mixed", LlamaConfig(**{**SMALL, "vocab_size": 512}, intermediate_size=48))
    seen = []
    plain = lazy_module.linear
    monkeypatch.setattr(engine, "linear", lambda x, w, b=None: seen.append((w.shape[0], len(x))) or plain(x, w, b))
    weights.both(3, 1e-2, loss_of(model))
    assert [batch for rows, batch in seen if rows == 512] == [len(TOKENS)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_local_steps_end_where_those_of_written_weights_end(family):
    found = []
    for mode in ("materialized", "factored"):
        model, weights = held(family, TIED, mode=mode)
        loss = loss_of(model)
        steps = zeroth_order_steps(
            weights, lambda batch, loss=loss: loss(batch), [TOKENS] * 4, np.arange(8, dtype=np.uint32),
            lr=1e-4, eps=1e-2, probes=2,
        )  # fmt: skip
        found.append((steps, weights))
    (one, written), (other, made) = found
    np.testing.assert_allclose(other.scalars, one.scalars, atol=2e-3 * np.abs(one.scalars).max() + 2e-3)
    written.load(made.c)
    assert written.digest() == made.digest()


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_0"])
def test_quantised_weights_stay_quantised(storage, model_folder):
    found = []
    for mode in ("streamed", "factored"):
        model = load_model(str(model_folder), storage=storage)
        weights = hold(model, Pool(1, 64, "separable"), mode=mode)
        weights.load(np.random.default_rng(1).normal(size=64) * 1e-3)
        losses = loss_of(model)(), *weights.both(3, 1e-2, loss_of(model))
        weights.settle()
        found.append((*losses, weights.digest()))
        assert any(isinstance(entry.tensor, Lazy) for entry in weights.layout.tuned)
    assert found[0][-1] == found[1][-1]
    assert found[0][:-1] == pytest.approx(found[1][:-1], rel=1e-5)


def test_the_kept_model_is_that_of_the_definition():
    model, weights = held("informed", TIED)
    other, written = held("informed", TIED, mode="materialized")
    weights.keep()
    assert Layout(model).digest() == written.digest()
    assert loss_of(model)() == loss_of(other)()


def test_restored_weights_are_the_base():
    model, weights = held("separable", TIED)
    weights.restore()
    assert Layout(model).digest() == weights.base_digest
    assert loss_of(model)() == loss_of(model_of(TIED))()


def test_other_families_are_refused():
    with pytest.raises(FedKSeedError, match="mode 'factored' is for factored families of directions"):
        hold(model_of(TIED), Pool(1, 64, "hadamard"), mode="factored")


def test_factored_directions_make_no_weights_unless_asked():
    assert isinstance(hold(model_of(TIED), Pool(1, 64, "separable")), FactoredWeights)
