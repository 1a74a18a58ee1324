"""Rows that run through the layers before the output layer once: the same loss and derivatives, fewer passes."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fedkseed import Pool, hold
from fedkseed.data.batches import IGNORED, Batch
from fedkseed.models.hidden_states import KeptStates, can_keep_states
from fedkseed.models.loss import output_loss, output_weights
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.loop import work
from fedkseed.run.simulation import Simulation
from fedkseed.run.start_and_resume import resume
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.tuned.untie import untie
from fedkseed.weights.layout import Layout
from fedkseed.weights.modes import MODES

from ..conftest import CONFIGS, recipe_text, tiny_llama

POOL = Pool(1, 64, "hadamard")


def made(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


def batch(*lengths: int) -> Batch:
    """Rows of these lengths, padded on the right, whose responses begin in different places."""
    rng, width = np.random.default_rng(0), max(lengths)
    tokens = torch.from_numpy(rng.integers(1, 60, (len(lengths), width)))
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    labels = torch.where(mask == 1, tokens, IGNORED)
    for row in range(len(lengths)):
        labels[row, : 3 + row] = IGNORED
    return Batch(tokens, mask, labels)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "factored"])
@pytest.mark.parametrize("config", [c for c in CONFIGS if not c.tie_word_embeddings], ids=lambda c: c.model_type)
def test_the_loss_and_its_derivatives_are_those_of_the_output_layer_and_rows_run_once(config, mode):
    model = made(config)
    weights = hold(model, POOL, output_weights(model), mode=mode)
    assert can_keep_states(model, weights.layout)
    remembered, rows = KeptStates(model), batch(12, 8, 10)
    for step in range(3):
        weights.load(np.random.default_rng(step).normal(size=64) * 1e-3)
        expected, slope = weights.gradient(lambda: output_loss(model, rows))
        loss, found = weights.gradient(lambda: remembered.loss(rows))
        assert loss == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(found, slope, atol=1e-4 * np.abs(slope).max())
    assert remembered.rows == 3


def test_without_room_rows_run_again_and_the_numbers_are_the_same_bits():
    model = made(LlamaConfig(**tiny_llama().config.to_dict() | {"tie_word_embeddings": False}))
    weights = hold(model, POOL, output_weights(model))
    rows = batch(12, 8)
    most, none = KeptStates(model), KeptStates(model, room=0)
    found = [weights.gradient(lambda one=one: one.loss(rows)) for one in (most, none, most, none)]
    assert len({loss for loss, _ in found}) == 1
    assert all(np.array_equal(slope, found[0][1]) for _, slope in found)
    assert (most.rows, none.rows) == (2, 4)


def test_a_model_whose_layers_move_or_whose_logits_are_made_of_more_is_not_remembered():
    tied = tiny_llama()
    assert not can_keep_states(tied, Layout(tied, output_weights(tied)))
    llama = made(next(c for c in CONFIGS if c.model_type == "llama"))
    assert not can_keep_states(llama, Layout(llama))
    assert not can_keep_states(llama, Layout(llama, ["lm_head.weight", "model.norm.weight"]))
    gemma = made(next(c for c in CONFIGS if c.model_type == "gemma2"))
    gemma.lm_head.weight = torch.nn.Parameter(gemma.lm_head.weight.clone(), requires_grad=False)
    assert not can_keep_states(gemma, Layout(gemma, ["lm_head.weight"]))  # it caps its logits


def test_a_model_that_makes_its_logits_without_calling_the_output_layer_once_is_not_remembered(monkeypatch):
    llama = made(next(c for c in CONFIGS if c.model_type == "llama"))
    layout, layer = Layout(llama, ["lm_head.weight"]), llama.lm_head
    assert can_keep_states(llama, layout)
    monkeypatch.setattr(layer, "forward", lambda hidden: torch.nn.functional.linear(hidden, layer.weight))
    assert can_keep_states(llama, layout)
    forward, zeros = type(llama).forward, torch.zeros(1, 2, 32)
    monkeypatch.setattr(type(llama), "forward", lambda self, **given: (layer(zeros), forward(self, **given))[1])
    assert not can_keep_states(llama, layout)


def test_a_stopped_run_goes_on_with_the_same_bits_and_runs_each_row_once(tmp_path, model_folder, data_file):
    untie(str(model_folder), tmp_path / "untied")
    changes = {"algorithm": 'algorithm = "fedkseed-plus"', "lr": "", "eps": "[derivatives]\nlr = 1e-2"}
    (tmp_path / "recipe.toml").write_text(recipe_text(tmp_path / "untied", data_file, **changes))
    recipe = load_recipe(tmp_path / "recipe.toml")
    simulation = Simulation(recipe)
    with Store.create(tmp_path / "whole", simulation.recipe.to_toml()) as store:
        whole = work(store, simulation.federation)
    assert whole.after.losses != whole.before.losses
    drawn = 3 * 2 * 3 * 2  # rounds, clients, steps, rows of a batch
    assert 0 < simulation.setup.remembered.rows <= min(drawn, sum(map(len, simulation.shares.clients)))

    class StopError(Exception):
        pass

    class Stopping(Simulation):
        def answer(self, *given):
            if not next(moments):
                raise StopError
            return super().answer(*given)

    moments = iter([True] * 3 + [False])  # in the middle of the second round
    with Store.create(tmp_path / "stopped", recipe.to_toml()) as store, pytest.raises(StopError):
        work(store, Stopping(recipe).federation)
    assert resume(tmp_path / "stopped").digest == whole.digest
    assert verify(Store(tmp_path / "stopped")).rounds == 3
