"""Memory is predicted from files and a recipe, and a run that can't fit is refused before its model is loaded."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fedkseed import FedKSeedError, Pool, Simulation, hold
from fedkseed.data.batches import IGNORED, Batch
from fedkseed.models.loss import graph_loss
from fedkseed.models.sizes import Architecture
from fedkseed.paper.byte_counts import LLAMA
from fedkseed.recipe.algorithms import algorithm_of
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.run import needed_memory, simulation
from fedkseed.run.needed_memory import LIBRARIES, Rows, predict
from fedkseed.weights.full import FullWeights
from fedkseed.weights.layout import Layout

ROWS = Rows(128, 100, 10_000)
OF = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def recipe(algorithm: str = "fedkseed", **tables):
    return parse({"model": {"name": "a/b"}, "training": {"algorithm": algorithm}} | tables)


def of(algorithm: str = "fedkseed", sizes: Architecture = LLAMA, cohort: int = 0, **tables):
    return predict(recipe(algorithm, **tables), sizes, ROWS, cohort=cohort)


def held(layers: int, dtype: str, algorithm: str):
    """A model of a few layers, and how its step makes a graph."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=128, tie_word_embeddings=True,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(OF[dtype]).requires_grad_(False).eval()
    tokens = torch.arange(64)[None]
    labels = tokens.clone()
    labels[:, 0] = IGNORED
    loss = partial(graph_loss, model, Batch(tokens, torch.ones_like(tokens), labels))
    if algorithm == "fedavg":
        weights = FullWeights(Layout(model), Pool(0, 8, "rademacher"))
        model.requires_grad_(True)
        return weights, lambda: loss().backward()
    weights = hold(model, Pool(0, 64))
    return weights, lambda: weights.gradient(loss)


def saved(layers: int, dtype: str, algorithm: str) -> int:
    """Bytes of the tensors, beside weights, that a graph keeps for the pass back."""
    weights, step = held(layers, dtype, algorithm)
    own = {entry.tensor.untyped_storage().data_ptr() for entry in weights.layout.entries}
    kept, alive = dict[int, int](), list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor and (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


@pytest.mark.parametrize("dtype", OF)
@pytest.mark.parametrize("algorithm", ["fedkseed-backprop", "fedavg"])
def test_what_a_layer_keeps_for_the_pass_back_is_what_pytorch_keeps(algorithm, dtype):
    parsed, sizes = recipe(algorithm, model={"name": "a/b", "dtype": dtype}), Architecture(64, 160, 1, 128, 64, 32)
    kept = needed_memory._kept(parsed, algorithm_of(algorithm), sizes, needed_memory.BYTES[dtype])
    assert 64 * kept == pytest.approx(saved(3, dtype, algorithm) - saved(2, dtype, algorithm), rel=0.03)


def test_copies_and_messages_are_counted_by_the_weight():
    half = {"model": {"name": "a/b", "dtype": "float16"}}
    gaussian = of(**half, directions={"family": "gaussian"})
    assert gaussian.lasting["copies"] == 4 * LLAMA.weights  # a float32 sum beside w_0
    assert of(**half).lasting["copies"] == 0
    assert of("fedmezo").lasting["copies"] == 4 * LLAMA.weights
    assert of("fedavg", cohort=8).total == of("fedavg", cohort=2).total  # a sum, made as uploads come
    assert of("fedkseed", cohort=8).total == of("fedkseed", cohort=2).total
    at_once = of("fedkseed", clients={"at_once": 2}).lasting["2 processes more"]
    assert at_once == 2 * of("fedkseed").total


def test_less_is_needed_for_fewer_layers_with_checkpointing_and_in_blocks():
    whole = of("fedkseed-backprop").phases["a step"]
    assert of("fedkseed-backprop", derivatives={"checkpointing": True}).phases["a step"] < whole / 4
    few = of("fedkseed-backprop", model={"name": "a/b", "last_layers": 2})
    assert few.phases["a step"] < whole / 2
    assert few.lasting["remembered rows"] == ROWS.every * LLAMA.hidden * 4
    in_file = replace(LLAMA, counted=LLAMA.weights, stored=2_000_000_000)
    blocks = of(sizes=in_file, model={"name": "a/b", "storage": "as stored"})
    assert (blocks.lasting["weights"], blocks.mapped, blocks.phases["loading"]) == (2_000_000_000, True, 0)
    assert blocks.unavoidable < 1_000_000_000 < blocks.total - LIBRARIES


def test_an_evaluation_needs_no_more_logits_for_more_tokens_but_for_its_accuracy():
    def evaluation(tokens: int, **table):
        settings = recipe(evaluation={"batch_size": 32} | table)
        return predict(settings, LLAMA, ROWS, Rows(128, tokens)).phases["an evaluation"]

    assert evaluation(100) == evaluation(20)
    assert evaluation(100, metrics=["accuracy"]) - evaluation(20, metrics=["accuracy"]) == 32 * 80 * 32_000 * 4
    caches = 32 * 128 * 2 * LLAMA.shared * LLAMA.layers * 4
    assert evaluation(100, metrics=["choice"]) - evaluation(100) == caches


def test_a_run_that_does_not_fit_is_refused_before_its_model_is_loaded(recipe_file, monkeypatch):
    asked = []
    monkeypatch.setattr(simulation, "build", lambda *args, **more: asked.append(args))
    monkeypatch.setattr(needed_memory, "available", lambda device: 40_000_000)
    with pytest.raises(FedKSeedError) as error:
        Simulation(load_recipe(recipe_file))
    assert "this run needs 0.68 GB (libraries 0.62, " in str(error.value)
    assert "and 0.04 GB are free; set [clients] at_once or [training] batch_size to less" in str(error.value)
    assert not asked


def test_a_run_that_fits_says_what_it_needs(recipe_file):
    with closing(Simulation(load_recipe(recipe_file))) as found:
        assert found.needed is not None
        assert LIBRARIES < found.needed.total < LIBRARIES + 100_000_000
