"""Derivatives along all directions: against finite differences and against PyTorch, in every architecture and mode."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from fedkseed import FedKSeedError, KSeed, Pool, Run, accumulate_, hold, project
from fedkseed.data.batches import IGNORED, Batch
from fedkseed.local.client import Client
from fedkseed.local.derivatives import derivative_steps
from fedkseed.local.optimizers import Optimizer
from fedkseed.local.work import LocalWork
from fedkseed.models import loss as losses
from fedkseed.models.load import load_model
from fedkseed.models.loss import batch_loss, checkpointed, graph_loss, output_loss, output_weights
from fedkseed.strategy import Settings
from fedkseed.weights import base as module
from fedkseed.weights import lazy
from fedkseed.weights.lazy import densify
from fedkseed.weights.modes import MODES
from fedkseed.wire.int8 import compact

from ..conftest import CONFIGS, tiny_llama

POOL = Pool(1, 64, "hadamard")
ANY_FAMILY = [mode for mode in MODES if mode != "factored"]  # which test_factored.py has tests for
every_mode = pytest.mark.parametrize("mode", ANY_FAMILY)


def batch(seed: int = 0) -> Batch:
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(1, 60, (2, 12)))
    labels = tokens.clone()
    labels[:, :5] = IGNORED
    return Batch(tokens, torch.ones_like(tokens), labels)


def coefficients() -> np.ndarray:
    return np.random.default_rng(0).normal(size=64) * 1e-3


def held(mode: str = "auto", tuned: tuple[str, ...] = ("*",)):
    """A tiny model, and the weights that it runs with."""
    model = tiny_llama()
    weights = hold(model, POOL, tuned, mode)
    weights.load(coefficients())
    return model, weights


def random_model(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


def with_checkpoints(model) -> torch.Tensor:
    with checkpointed(model):
        return graph_loss(model, batch())


def by_pytorch(model, loss) -> np.ndarray:
    """Zᵀ∇L the slow way: autograd on a dense model, then inner products with every direction."""
    weights = hold(model, POOL, mode="materialized")
    weights.load(coefficients())
    parameters = [entry.places[0][0]._parameters[entry.places[0][1]] for entry in weights.layout.tuned]
    with torch.enable_grad():
        for p in parameters:
            p.requires_grad_(True)
        grads = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slope = np.zeros(64)
    for entry, g in zip(weights.layout.tuned, grads, strict=True):
        if g is not None:
            for j in range(64):
                z = torch.zeros_like(g)
                accumulate_(z, POOL, [j], [1.0], tensor=entry.number)
                slope[j] += float((z.double() * g.double()).sum())
    return slope


# Prints how many bytes of 63 freed MB stay, beneath one that is in use: as glibc is, and with the setting.
FREED = """
import torch
from fedkseed.models.load import return_large_blocks

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

def kept():
    before, blocks = resident(), [torch.ones(1 << 18) for _ in range(64)]
    del blocks[:-1]
    return resident() - before, blocks

torch.ones(1 << 22)  # glibc keeps blocks as large as one that was freed
first, _ = kept(), return_large_blocks()
second = kept()
print(first[0], second[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is glibc's")
def test_checkpointing_gives_freed_blocks_back_to_the_system():
    found = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True).stdout
    kept, returned = map(int, found.split())
    assert returned < 1 << 22 < 1 << 25 < kept


@every_mode
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_derivatives_of_every_architecture_are_autograds(config, mode):
    model, again = random_model(config), random_model(config)
    expected = by_pytorch(model, lambda: graph_loss(model, batch()))
    weights = hold(again, POOL, mode=mode)
    weights.load(coefficients())
    loss, slope = weights.gradient(lambda: graph_loss(again, batch()))
    np.testing.assert_allclose(slope, expected, atol=1e-4 * np.abs(expected).max())
    assert loss == pytest.approx(batch_loss(again, batch()), rel=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_matrices_that_are_made_again_in_tiles_have_the_derivatives_of_whole_ones(config, monkeypatch):
    model = random_model(config)
    weights = hold(model, POOL, mode="streamed")
    weights.load(coefficients())
    loss, expected = weights.gradient(lambda: graph_loss(model, batch()))
    monkeypatch.setattr(lazy, "TILE", 64)  # two rows of most matrices
    again, slope = weights.gradient(lambda: graph_loss(model, batch()))
    assert again == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(slope, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_logits_in_slices_have_the_derivatives_of_all_at_once(config, monkeypatch):
    model = random_model(config)
    weights = hold(model, POOL)
    weights.load(coefficients())
    loss, expected = weights.gradient(lambda: graph_loss(model, batch()))
    counts, of_logits = [], losses._losses
    monkeypatch.setattr(losses, "_losses", lambda *parts: counts.append(parts[1].numel()) or of_logits(*parts))
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 1)
    again, slope = weights.gradient(lambda: with_checkpoints(model))
    assert (max(counts), sum(counts)) == (4, 2 * 2 * 7)  # seven tokens of two rows, four at a time, twice
    assert again == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(slope, expected, atol=1e-5 * np.abs(expected).max())
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_many_logits_are_those_of_tokens_that_count_alone(config, monkeypatch):
    model, made = random_model(config), []
    weights, some = hold(model, POOL), batch()
    some.labels[0, 5:10] = IGNORED
    weights.load(coefficients())
    loss, expected = weights.gradient(lambda: graph_loss(model, some))
    monkeypatch.setattr(losses, "MANY_LOGITS", 1)
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: made.append(out.shape[:-1].numel()))
    again, slope = weights.gradient(lambda: graph_loss(model, some))
    assert made == [2 + 7]
    assert again == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(slope, expected, atol=1e-5 * np.abs(expected).max())
    both = weights.both(0, 1e-3, lambda: batch_loss(model, some))
    monkeypatch.undo()
    assert both == weights.both(0, 1e-3, lambda: batch_loss(model, some)), "points that take turns are as before"


@pytest.mark.parametrize("storage", ["dense", "Q8_0"])
def test_no_matrix_of_a_linear_layer_is_kept_for_the_pass_back(storage, model_folder):
    model = load_model(str(model_folder), storage=storage)
    weights, kept = hold(model, POOL, mode="streamed"), set[tuple[int, ...]]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(tuple(t.shape)) or t, lambda t: t):
        weights.gradient(lambda: graph_loss(model, batch()))
    matrices = {tuple(entry.tensor.shape) for entry in weights.layout.tuned if entry.tensor.ndim == 2}
    assert kept
    assert not kept & (matrices | {shape[::-1] for shape in matrices})


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_checkpointing_changes_no_derivative_and_leaves_the_model_as_it_was(config):
    model = random_model(config)
    weights = hold(model, POOL)
    weights.load(coefficients())
    _, expected = weights.gradient(lambda: graph_loss(model, batch()))
    calls: list[bool] = []
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *_: calls.append(True))
    _, slope = weights.gradient(lambda: with_checkpoints(model))
    assert len(calls) == 2
    np.testing.assert_allclose(slope, expected, atol=1e-6 * np.abs(expected).max())
    assert not any(module.training for module in model.modules())
    assert getattr(layer, "dropout", 0.1) != 0.0


@every_mode
def test_a_two_point_estimate_is_one_of_the_derivatives(mode):
    model, weights = held(mode)
    _, slope = weights.gradient(lambda: graph_loss(model, batch()))
    for j in (0, 17, 63):
        above, below = weights.both(j, 1e-3, lambda: batch_loss(model, batch()))
        assert (above - below) / 2e-3 == pytest.approx(slope[j], abs=0.02)


@every_mode
def test_the_output_layers_derivatives_need_no_graph_below_it(mode):
    model, weights = held(mode, ("lm_head*",))
    seen = []
    hooks = [
        layer.register_forward_hook(lambda *args: seen.append(args[2][0].requires_grad)) for layer in model.model.layers
    ]
    _, slope = weights.gradient(lambda: output_loss(model, batch()))
    for hook in hooks:
        hook.remove()
    assert seen == [False, False]
    # by hand: (softmax − one-hot)ᵀ h of every token that counts
    b = batch()
    with torch.no_grad():
        hidden = model.model(input_ids=b.tokens, attention_mask=b.mask).last_hidden_state[:, :-1]
        labels = b.labels[:, 1:]
        h, y = hidden[labels != IGNORED], labels[labels != IGNORED]
        d = model.lm_head(h).softmax(-1)
        d[torch.arange(len(y)), y] -= 1
        g = (d.T @ h / len(y)).contiguous()
    expected = project(g, POOL, tensor=weights.layout.tuned[0].number)
    np.testing.assert_allclose(slope, expected, atol=1e-5 * np.abs(expected).max())


@every_mode
def test_nothing_is_left_behind(mode):
    model, weights = held(mode)
    before = weights.digest()
    weights.gradient(lambda: graph_loss(model, batch()))
    assert weights.digest() == before
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    above, _ = weights.both(3, 1e-3, lambda: batch_loss(model, batch()))
    assert np.isfinite(above)


def test_gradients_are_let_go_of_tensor_by_tensor(monkeypatch):
    model = tiny_llama()
    weights = hold(model, POOL, mode="materialized")
    held: list[int] = []
    project = module.project_pieces

    def watched(pieces, pool):
        held.append(sum(p.grad is not None for p in model.parameters()))
        return project(pieces, pool)

    monkeypatch.setattr(module, "project_pieces", watched)
    weights.gradient(lambda: graph_loss(model, batch()))
    assert len(held) == len(weights.layout.tuned)
    assert max(held) == 1


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_0"])
def test_a_quantised_model_has_the_derivatives_of_its_dense_twin(storage, model_folder):
    slopes = []
    for dense in (False, True):
        model = load_model(str(model_folder), storage=storage)
        if dense:
            densify(model)
        weights = hold(model, POOL)
        weights.load(coefficients())
        slopes.append(weights.gradient(lambda model=model: graph_loss(model, batch()))[1])
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-5, atol=1e-6)


def test_steps_lower_the_loss_and_say_how_far_they_went():
    model = tiny_llama()
    weights = hold(model, POOL)
    one = batch()
    before = batch_loss(model, one)
    moved = derivative_steps(
        weights, lambda b: graph_loss(model, b), iter([one] * 10), steps=10, lr=1e-3, optimizer=Optimizer("adam")
    )
    assert moved.skipped == 0
    assert batch_loss(model, one) < before - 0.1
    np.testing.assert_array_equal(moved.change, weights.c)


def test_a_step_whose_loss_is_not_finite_moves_nothing():
    model = tiny_llama()
    weights = hold(model, POOL)
    broken = [float("inf"), float("nan")]
    moved = derivative_steps(
        weights, lambda factor: graph_loss(model, batch()) * factor, broken, steps=2, lr=1.0, optimizer=Optimizer()
    )
    assert moved.skipped == 2
    assert not moved.change.any()


def test_a_loss_that_tuned_weights_can_not_change_is_told_of():
    model = AutoModelForCausalLM.from_config(CONFIGS[0]).requires_grad_(False).eval()  # its embeddings are not tied
    for mode in ANY_FAMILY:
        weights = hold(model, POOL, ["model.layers.*"], mode)
        with pytest.raises(FedKSeedError, match="the loss does not depend on the tuned weights"):
            weights.gradient(lambda: output_loss(model, batch()))
        weights.restore()


def test_a_layer_that_drops_out_by_itself_does_not_while_it_is_checkpointed():
    config = FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, hidden_dropout=0.5)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    weights = hold(model, POOL)
    expected, slope = weights.gradient(lambda: graph_loss(model, batch()))
    found, other = weights.gradient(lambda: with_checkpoints(model))
    assert found == expected
    np.testing.assert_allclose(other, slope, atol=1e-6 * np.abs(slope).max())


def test_a_clip_bounds_changes_as_well():
    model, run = tiny_llama(), Run(POOL, bytes(32))
    local, derivatives = LocalWork(1, steps=2, lr=1e-3, clip=0.01), LocalWork(1, "adam", 5, lr=1e-3)
    strategy = KSeed.make(Settings(run, local, derivatives))
    weights = hold(model, POOL)
    client = Client(
        0, weights, 1, lambda round_: iter([batch()] * 5), lambda b: 0.0, graph=lambda b: graph_loss(model, b)
    )
    message = strategy.server.broadcast(strategy.server.init())
    change = strategy.client.train(message, client)
    assert np.abs(change.values).max() == pytest.approx(1e-3 * 2 * 0.01, rel=1e-3)
    strategy.aggregate(strategy.server.init(), [change])
    large = replace(change, values=compact(change.values * 3))
    with pytest.raises(FedKSeedError, match=r"client 0 moves a coefficient by 6\.0.*e-05, at most 2e-05 is allowed"):
        strategy.aggregate(strategy.server.init(), [large])


def test_coefficients_that_diverge_are_told_of():
    model = tiny_llama()
    weights = hold(model, POOL)
    with pytest.raises(FedKSeedError, match=r"the coefficients have diverged; use a smaller lr than 1e\+39"):
        derivative_steps(
            weights, lambda b: graph_loss(model, b), iter([batch()]), steps=1, lr=1e39, optimizer=Optimizer("adam")
        )


def test_the_output_layers_weights_have_names():
    assert output_weights(tiny_llama()) == ["model.embed_tokens.weight", "lm_head.weight"]  # tied
    untied = AutoModelForCausalLM.from_config(CONFIGS[0])
    assert output_weights(untied) == ["lm_head.weight"]


def test_a_client_without_a_graph_takes_forward_steps():
    model, run = tiny_llama(), Run(POOL, bytes(32))
    strategy = KSeed.make(Settings(run, LocalWork(1, steps=2, lr=1e-3), LocalWork(1, "adam", 2, lr=1e-3)))
    weights = hold(model, POOL)
    client = Client(0, weights, 1, lambda round_: iter([batch(), batch(1)]), lambda b: batch_loss(model, b))
    message = strategy.server.broadcast(strategy.server.init())
    assert type(strategy.client.train(message, client)).__name__ == "Upload"
