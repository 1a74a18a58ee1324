"""The last layers tuned alone: what comes before them runs once a row, and no number shows it."""

import gc
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    MptConfig,
    OlmoConfig,
    PhiConfig,
    PretrainedConfig,
    StableLmConfig,
)

from fedkseed import FedKSeedError, Pool, Simulation, hold, resume, start
from fedkseed.data.batches import Encoded, collate
from fedkseed.data.sources import Example
from fedkseed.models import tail
from fedkseed.models.hidden_states import remember
from fedkseed.models.loss import batch_loss, checkpointed, example_losses, graph_loss, option_losses
from fedkseed.models.tail import Tail, decoder_layers, last_layers
from fedkseed.planning.pin import pin
from fedkseed.recipe.algorithms import algorithm_of
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.recipe.schema import Recipe
from fedkseed.run.loop import work
from fedkseed.run.progress import Silent
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.tuned.load import open_tuned
from fedkseed.weights.basis_file import save_basis
from fedkseed.weights.layout import Layout

from ..conftest import CONFIGS, SMALL, recipe_text, small_basis, tiny_llama

FOUR = SMALL | {"num_hidden_layers": 4}
MORE: list[PretrainedConfig] = [
    GraniteConfig(**FOUR, intermediate_size=48, num_key_value_heads=1, embedding_multiplier=12.0),
    Gemma3TextConfig(
        **FOUR, intermediate_size=48, num_key_value_heads=1, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    FalconConfig(**FOUR), PhiConfig(**FOUR, intermediate_size=48), GPTNeoXConfig(**FOUR, intermediate_size=48),
    BloomConfig(hidden_size=32, n_layer=4, n_head=2, vocab_size=64),
    CohereConfig(**FOUR, intermediate_size=48, num_key_value_heads=1),
    StableLmConfig(**FOUR, intermediate_size=48, num_key_value_heads=1), OlmoConfig(**FOUR, intermediate_size=48),
    MptConfig(d_model=32, n_heads=2, n_layers=4, vocab_size=64),
]  # fmt: skip
ROWS = [Encoded(tuple(range(1, n)), n - 4, Example("", "")) for n in (9, 14, 20)]
PROMPTS = [tuple(range(1, 12)), tuple(range(1, 15))]
OPTIONS = [[(1, 2), (3,)], [(4, 5, 6)]]


def model_of(config: PretrainedConfig) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


def held(
    model: nn.Module, family: str = "hadamard", mode: str = "auto", patterns: Sequence[str] | None = None, **more: Any
) -> tuple[Any, Tail]:
    weights = hold(model, Pool(1, 64, family), last_layers(model, 1) if patterns is None else patterns, mode)
    tail = remember(model, weights, **more)
    assert isinstance(tail, Tail), tail
    return weights, tail


def coefficients() -> Any:
    return np.random.default_rng(3).normal(size=64) * 1e-3


@pytest.mark.parametrize("config", [*CONFIGS, *MORE], ids=lambda config: config.model_type)
def test_losses_and_derivatives_through_the_border_are_those_of_the_whole_model(config):
    found = []
    for remembers in (False, True):
        model = model_of(config)
        if remembers:
            weights, _ = held(model)
        else:
            weights = hold(model, Pool(1, 64, "hadamard"), last_layers(model, 1))
        weights.load(coefficients())
        row = collate(ROWS[2:], 0)
        above, below = weights.both(3, 1e-2, lambda model=model, row=row: batch_loss(model, row))
        for _ in range(2):  # the second time from what is remembered
            evaluated = example_losses(model, ROWS, 0), option_losses(model, PROMPTS, OPTIONS, 0)
        loss, slope = weights.gradient(lambda model=model, row=row: graph_loss(model, row))
        found.append((above, below, loss, slope.tolist(), evaluated))
        assert above != below
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "mode"),
    [("hadamard", "streamed"), ("hadamard", "materialized"), ("gaussian", "in place"), ("separable", "factored")],
)
def test_a_row_runs_through_the_first_layers_once(family, mode):
    model = model_of(CONFIGS[0])
    weights, tail = held(model, family, mode)
    ran, first = [0], decoder_layers(model)[1][0]
    first.get_submodule("mlp").register_forward_hook(lambda *_: ran.__setitem__(0, ran[0] + 1))
    batches = [collate(rows, 0) for rows in (ROWS[:2], ROWS[1:], ROWS[:2])]
    for batch in batches:
        weights.both(3, 1e-3, lambda batch=batch: batch_loss(model, batch))
        weights.gradient(lambda batch=batch: graph_loss(model, batch))
        with checkpointed(model):
            weights.gradient(lambda batch=batch: graph_loss(model, batch))
    assert ran[0] == tail.passes == len(ROWS)
    example_losses(model, ROWS, 0)
    before = ran[0]
    example_losses(model, ROWS, 0)
    assert (ran[0], tail.left_out) == (before, 0)


def test_no_bit_depends_on_what_finds_room():
    found = []
    for room in (0, 3000, 1 << 20):
        model = model_of(CONFIGS[3])
        weights, tail = held(model, room=room)
        weights.load(coefficients())
        numbers: list[Any] = []
        for rows in (ROWS, ROWS[1:], ROWS[:1]):
            batch = collate(rows, 0)
            numbers += weights.both(3, 1e-3, lambda batch=batch, model=model: batch_loss(model, batch))
            numbers.append(weights.gradient(lambda batch=batch, model=model: graph_loss(model, batch))[1].tolist())
            numbers.append((example_losses(model, rows, 0), option_losses(model, PROMPTS, OPTIONS, 0)))
        found.append(numbers)
        assert (tail.left_out > 0) == (room < 1 << 20)
        assert sum(t.nbytes for states in tail.kept.values() for t in states) <= room
    assert found[0] == found[1] == found[2]


def test_derivatives_after_forward_steps_use_the_same_states():
    """Mixed cohorts: what a forward-only client has remembered enters the graph of another client's pass."""
    model = model_of(CONFIGS[0])
    weights, tail = held(model)
    batch = collate(ROWS, 0)
    weights.both(3, 1e-3, lambda: batch_loss(model, batch))
    again = collate(ROWS, 0)
    loss, slope = weights.gradient(lambda: graph_loss(model, again))
    assert tail.passes == len(ROWS)
    assert np.isfinite(loss)
    assert np.abs(slope).min() > 0


def test_a_model_that_is_closed_has_its_own_passes_back():
    model = model_of(CONFIGS[0])
    forwards = [layer.forward for layer in decoder_layers(model)[1]]
    weights, tail = held(model)
    tail.close()
    assert [layer.forward for layer in decoder_layers(model)[1]] == forwards
    weights.both(3, 1e-3, lambda: batch_loss(model, collate(ROWS, 0)))
    assert tail.passes == 0


def every(model: Any) -> list[str]:
    return ["*"]


def tied_head(model: Any) -> list[str]:
    return [*last_layers(model, 1), "lm_head.*"]


@pytest.mark.parametrize(
    ("patterns", "why"), [(every, "the first layer is tuned"), (tied_head, "its loss would be another")]
)
def test_states_that_change_are_not_remembered(patterns: Callable[[Any], list[str]], why: str):
    """A tied output matrix is the input embedding, too: what comes before the tail depends on it."""
    model = tiny_llama()
    forwards = [layer.forward for layer in decoder_layers(model)[1]]
    weights = hold(model, Pool(1, 64, "hadamard"), patterns(model))
    assert remember(model, weights) == why
    assert [layer.forward for layer in decoder_layers(model)[1]] == forwards
    assert weights.digest() == weights.base_digest


@pytest.mark.parametrize("config", [*CONFIGS, *MORE], ids=lambda config: config.model_type)
def test_the_last_layers_and_the_final_norm_alone_are_tuned(config):
    model = model_of(config)
    _, layers = decoder_layers(model)
    names = {entry.name for entry in Layout(model, last_layers(model, 1)).tuned}
    of_layer = {f"{decoder_layers(model)[0]}.{len(layers) - 1}.{name}" for name, _ in layers[-1].named_parameters()}
    others = names - of_layer
    assert of_layer <= names
    assert all("norm" in name or "ln_f" in name for name in others)
    assert all(model.get_parameter(name).ndim == 1 for name in others)


def test_an_output_matrix_of_its_own_can_be_tuned_beside_the_last_layers():
    model = model_of(CONFIGS[0])  # not tied
    assert last_layers(model, 1, head=True) == [*last_layers(model, 1), "lm_head.weight"]
    weights, tail = held(model, patterns=last_layers(model, 1, head=True))
    weights.both(3, 1e-3, lambda: batch_loss(model, collate(ROWS, 0)))
    assert tail.passes == len(ROWS)


def test_layers_that_are_not_there_are_refused():
    model = tiny_llama()
    with pytest.raises(FedKSeedError, match="last_layers is 3, the model has 2 layers"):
        last_layers(model, 3)
    with pytest.raises(FedKSeedError, match="shares its matrix with the input embedding; leave head out"):
        last_layers(model, 1, head=True)
    with pytest.raises(FedKSeedError, match="no list of layers"):
        last_layers(nn.Sequential(nn.Linear(2, 2)), 1)


# Two-point clients, clients that take derivatives, and both in one round; and LoRA.
WAYS: dict[str, dict[str, Any]] = {
    "two points": {},
    "derivatives": {"training": {"algorithm": "fedkseed-backprop"}},
    "mixed": {"clients": {"backpropagating": 0.5}},
    "lora": {"training": {"algorithm": "fedit", "eps": None}},
    "two at once": {"clients": {"at_once": 2}},
    "one point": {"training": {"algorithm": "fedzo"}},
    "blocks": {"model": {"storage": "Q8_0"}},
}


def recipe_of(model: Path, data: Path, *changes: dict[str, Any], last: int = 1) -> Recipe:
    tables = tomllib.loads(recipe_text(model, data))
    tables["model"]["last_layers"] = last
    tables["evaluation"]["every"] = 1
    for table, keys in [item for change in changes for item in change.items()]:
        kept = tables.get(table, {}) | keys
        tables[table] = {key: value for key, value in kept.items() if value is not None}
    return parse(tables)


@pytest.mark.parametrize("way", ["derivatives", "mixed", "lora"])
@pytest.mark.parametrize("last", [1, None])
def test_the_model_of_a_run_goes_with_it(way, last, tmp_path, model_folder, data_file, monkeypatch):
    models = []
    monkeypatch.setattr(Simulation, "close", lambda own: models.append(ref(own.setup.model)))
    start(recipe_of(model_folder, data_file, WAYS[way], {"model": {"last_layers": last}}), tmp_path / "run")
    gc.collect()
    assert [model() for model in models] == [None]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_the_last_layers_goes_on_with_the_same_bits(way, tmp_path, model_folder, data_file):
    recipe = recipe_of(model_folder, data_file, WAYS[way])
    whole = start(recipe, tmp_path / "whole")
    assert whole.after.losses != whole.before.losses

    class StopError(Exception):
        pass

    class Stopping(Simulation):
        def round(self, state: Any, *more: Any) -> Any:
            if state.round == 1:
                raise StopError
            return super().round(state, *more)

    simulation = Stopping(recipe)
    with Store.create(tmp_path / "stopped", simulation.recipe.to_toml()) as store, pytest.raises(StopError):
        work(store, simulation.federation)
    simulation.close()
    pooled = algorithm_of(recipe.training.algorithm).pooled
    if pooled:
        assert open_tuned(tmp_path / "stopped").remark
    assert resume(tmp_path / "stopped").digest == whole.digest
    if not pooled:
        return
    assert verify(Store(tmp_path / "stopped")).rounds == 3
    adapter = open_tuned(tmp_path / "whole").adapter
    assert adapter is not None
    assert adapter.patterns == ("model.layers.1.*", "model.norm.*")


def test_a_run_says_how_many_passes_found_no_room(tmp_path, model_folder, data_file, monkeypatch):
    monkeypatch.setattr(tail, "ROOM", 3000)

    class Told(Silent):
        def note(self, text: str) -> None:
            told.append(text)

    told: list[str] = []
    start(recipe_of(model_folder, data_file), tmp_path / "run", Told())
    assert "the layers before the last 1 run once a row" in told
    assert any("passes of the first layers found no room in memory" in text for text in told)


def test_all_processes_of_a_machine_together_have_one_room(monkeypatch):
    assert tail.room(1) == tail.ROOM
    assert 3 * tail.room(2) <= tail.ROOM, "two that train, and the one that evaluates"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert 8 * tail.room(1) == tail.ROOM


def test_lora_of_the_last_layers_sends_theirs_alone(model_folder, data_file):
    sizes = []
    for last in (1, 2):
        simulation = Simulation(recipe_of(model_folder, data_file, WAYS["lora"], last=last))
        sizes.append(simulation.setup.weights.layout.size)
        assert all(
            f"layers.{2 - last}" in e.name or "layers.1" in e.name for e in simulation.setup.weights.layout.tuned
        )
        simulation.close()
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"training": {"algorithm": "fedkseed-plus"}}, "tunes the output layer, which is no part of the last layers"),
        ({"training": {"algorithm": "fedprompt", "eps": None}}, "tunes the input of the first layer, which is no part"),
        ({"model": {"tuned": ["*"]}}, "tuned names .'\\*'., and last_layers = 1 tunes .'model.layers.1.\\*', "),
        ({"model": {"last_layers": 3}}, "last_layers is 3, the model has 2 layers"),
        ({"model": {"last_layers": 3}, **WAYS["lora"]}, "last_layers is 3, the model has 2 layers"),
        ({"model": {"head": True}, **WAYS["lora"]}, "tunes adapters, and the output layer has none"),
        ({"model": {"last_layers": None, "head": True}}, "head tunes the output layer beside the last layers"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_does_not_go_with_the_last_layers_is_refused(change, why, model_folder, data_file):
    with pytest.raises(FedKSeedError, match=why):
        Simulation(recipe_of(model_folder, data_file, change))


def test_a_basis_of_tensors_that_are_not_tuned_is_refused(tmp_path, model_folder, data_file):
    save_basis(small_basis(tiny_llama()), tmp_path / "basis.safetensors")
    directions = {"family": "informed", "size": None, "basis": str(tmp_path / "basis.safetensors")}
    with pytest.raises(FedKSeedError, match=r"directions of 10 tensors that are not tuned, as lm_head"):
        Simulation(recipe_of(model_folder, data_file, {"directions": directions}))


def test_pin_writes_the_names_of_the_last_layers(tmp_path, model_folder, data_file):
    """A server then needs no model, and a client that knows no `last_layers` needs no other key."""
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_of(model_folder, data_file).to_toml(defaults=False))
    assert pin(path)["model"]["tuned"] == ["model.layers.1.*", "model.norm.*"]
    pinned = load_recipe(path)
    assert pinned.model.tuned == ["model.layers.1.*", "model.norm.*"]
    Simulation(pinned).close()
