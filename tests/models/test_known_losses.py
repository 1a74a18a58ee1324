"""The losses of a base model, by which the same weights under another config.json are known to be another model."""

import json
import shutil
from functools import partial
from math import nan

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fedkseed import Adapter, FedKSeedError, Simulation
from fedkseed.models.known_losses import TOLERANCE, losses, require_losses
from fedkseed.models.load import load_model
from fedkseed.planning.make_basis import basis_of
from fedkseed.planning.pin import pin
from fedkseed.recipe.reading import load_recipe
from fedkseed.recipe.schema import KNOWN_LOSSES
from fedkseed.run.progress import Silent
from fedkseed.run.start_and_resume import base_scores, resume, start
from fedkseed.run.store import Store
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned

from ..conftest import CONFIGS, recipe_text, widened, widened_folder


def model(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return widened(AutoModelForCausalLM.from_config(config).eval())


def changes(config):
    """What another config.json may say of the same weights, by the keys that a kind of model has."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope:
        yield {"rope_parameters": rope | {"rope_theta": rope["rope_theta"] / 50}}
        yield {"rope_parameters": rope | {"rope_type": "linear", "factor": 4.0}}
        yield {"rope_parameters": rope | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}}
    for key in ("rms_norm_eps", "layer_norm_epsilon"):
        if hasattr(config, key):
            yield {key: 0.5}
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        if hasattr(config, key):
            yield {key: "relu" if getattr(config, key) != "relu" else "silu"}
    for key in ("query_pre_attn_scalar", "sliding_window", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            yield {key: type(getattr(config, key))(2)}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_same_weights_under_another_configuration_are_refused(config):
    right = model(config)
    known = losses(right)
    assert len(known) == KNOWN_LOSSES
    require_losses(losses(right), known, "float32", "it")
    several = [*changes(config)]
    assert several
    for change in several:
        other = type(right)(type(config).from_dict(config.to_dict() | change)).eval()
        other.load_state_dict(right.state_dict())
        with pytest.raises(FedKSeedError, match=r"^the model it computes otherwise than the run's: its losses"):
            require_losses(losses(other), known, "float32", "it")


@pytest.mark.parametrize(
    "stated", [[1.0, 2.0, 3.0], "1", None, [1.0, 2.0, 3.0, "4"], [1.0, 2.0, 3.0, nan], [10**400] * 4, []]
)
def test_losses_in_a_file_that_are_none(stated):
    with pytest.raises(FedKSeedError, match=r"computes otherwise than the run's"):
        require_losses([1.0, 2.0, 3.0, 4.0], stated, "float32", "it")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_may_differ(dtype):
    known, most = [1.0, 2.0, 3.0, 4.0], TOLERANCE[dtype]
    require_losses([1.0, 2.0, 3.0 - 0.99 * most, 4.0 + 0.99 * most], known, dtype, "it")
    with pytest.raises(FedKSeedError, match=f"may differ by {most:g}"):
        require_losses([1.0, 2.0, 3.0, 4.0 + 1.01 * most], known, dtype, "it")


def test_losses_that_are_not_finite_and_models_of_few_tokens():
    broken = model(CONFIGS[0])
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    assert losses(broken) == []
    with pytest.raises(FedKSeedError, match=r"its losses on known tokens are \[\], "):
        require_losses([], [1.0, 2.0, 3.0, 4.0], "float32", "it")
    short = type(CONFIGS[1]).from_dict(CONFIGS[1].to_dict() | {"n_positions": 7})
    assert len(losses(model(short))) == KNOWN_LOSSES


@pytest.fixture
def folder(model_folder, tmp_path):
    return widened_folder(model_folder, tmp_path / "model")


@pytest.fixture
def other_folder(folder, tmp_path):
    """The same weights and tokenizer, and another config.json."""
    shutil.copytree(folder, folder := tmp_path / "other")
    about = json.loads((folder / "config.json").read_text())
    about["rope_parameters"] |= {"rope_theta": 2.0}
    about["rms_norm_eps"] = 0.5
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("more", ["", 'mode = "materialized"', "last_layers = 1", 'storage = "Q8_0"'])
def test_a_pinned_recipe_and_its_tuned_model_refuse_another_configuration(
    tmp_path, folder, other_folder, data_file, more
):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(folder, data_file, name=f'name = "{folder}"\n{more}'))
    known = pin(path)["model"]["losses"]
    recipe = load_recipe(path)
    assert recipe.model.losses == known
    start(recipe, tmp_path / "run")
    wrong = recipe.having(model={"name": str(other_folder)})
    with pytest.raises(FedKSeedError, match=f"^the model {other_folder} computes otherwise than the run's: its losses"):
        start(wrong, tmp_path / "wrong")
    assert open_tuned(tmp_path / "run", None).load() is not None
    for load in ("load", "load_base"):
        with pytest.raises(FedKSeedError, match=f"^the model {other_folder} computes otherwise"):
            getattr(open_tuned(tmp_path / "run", str(other_folder)), load)()


def test_a_run_states_what_its_model_computes(tmp_path, folder, other_folder, data_file):
    """And is not resumed with another, nor takes scores of one."""
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(folder, data_file, name=f'name = "{folder}"'))
    start(recipe := load_recipe(path), first := tmp_path / "first")
    stated = Store(first).load_recipe().model.losses
    assert stated == losses(load_model(str(folder))) == Adapter.load(Store(first).adapter).provenance["losses"]
    with pytest.raises(FedKSeedError, match=f"^the model {other_folder} computes otherwise"):
        resume(first, model=str(other_folder))
    assert Store(first).load_recipe().model.name == str(folder)
    other = recipe.having(model={"name": str(other_folder)})
    for place, model in (("same", recipe), ("other", other)):
        moved = model.having(model={"name": str(folder)})
        simulation = Simulation(model.absolute(), begins=True)
        found = base_scores(simulation.recipe.having(model={"name": moved.model.name}), simulation.identity, [first])
        assert (found is None) == (place == "other")
    with pytest.raises(FedKSeedError, match="or storage leave losses out, or pin its recipe"):
        start(Store(first).load_recipe().having(model={"name": str(other_folder)}), tmp_path / "again")


def test_a_run_without_stated_losses_goes_on_without(tmp_path, folder, data_file):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(folder, data_file, name=f'name = "{folder}"'))
    start(load_recipe(path), run := tmp_path / "run")
    store = Store(run)
    old = store.load_recipe().having(model={"losses": None})
    store.change_recipe(old.to_toml())
    assert resume(run).output is not None
    assert store.load_recipe() == old
    assert "losses" not in Adapter.load(resume(run).output).provenance


@pytest.mark.parametrize("algorithm", ["fedit", "fedavg"])
def test_adapters_and_whole_weights_know_the_losses_of_their_base(tmp_path, folder, other_folder, data_file, algorithm):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(folder, data_file, name=f'name = "{folder}"', algorithm=f'algorithm = "{algorithm}"'))
    start(load_recipe(path), run := tmp_path / "run")
    assert open_tuned(run, None).losses == losses(load_model(str(folder)))
    assert open_tuned(run, None).load_base() is not None
    with pytest.raises(FedKSeedError, match=f"^the model {other_folder} computes otherwise"):
        open_tuned(run, str(other_folder)).load_base()


def test_a_basis_is_not_made_of_another_model(tmp_path, folder, other_folder, data_file):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(folder, data_file, name=f'name = "{folder}"'))
    pin(path)
    made = partial(basis_of, data=str(data_file), examples=4, rank=2, progress=Silent(), scaled=False)
    recipe = load_recipe(path)
    assert made(recipe).factors
    with pytest.raises(FedKSeedError, match=f"^the model {other_folder} computes otherwise"):
        made(recipe.having(model={"name": str(other_folder)}))


def test_a_lora_of_a_run_in_another_storage_is_its_base_model_in_any(tmp_path, folder, data_file):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(folder, data_file, name=f'name = "{folder}"\nstorage = "Q4_0"'))
    start(load_recipe(path), run := tmp_path / "run")
    export(open_tuned(run, None), out := tmp_path / "lora", "peft", rank=4)
    assert open_tuned(out, None).load() is not None


def test_pin_of_a_model_without_finite_losses_states_none(tmp_path, folder, data_file):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(folder, data_file, name=f'name = "{folder}"'))
    assert "losses" in pin(path)["model"]
    broken = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        broken.model.norm.weight[0] = nan
    broken.save_pretrained(folder)
    assert "losses" not in pin(path)["model"]
    assert load_recipe(path).model.losses is None
