"""Every algorithm through the whole program: it trains, resumes, and what it leaves can be used."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fedkseed import Adapter, FedKSeedError, apply, resume, start
from fedkseed.cli import app
from fedkseed.evaluation.evaluate import respond
from fedkseed.evaluation.statistics import paired_change
from fedkseed.models.load import load_tokenizer
from fedkseed.models.peft_adapters import PATTERNS, attach
from fedkseed.planning.compare import ROUNDS_AWAY, compare, measure, with_algorithm
from fedkseed.recipe.algorithms import ALGORITHMS
from fedkseed.recipe.reading import load_recipe
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.recipe.schema import PeftTable, SecureTable
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store
from fedkseed.weights.layout import Layout

from ..conftest import CONFIGS, recipe_text, tiny_llama

OWN = str(Path(__file__).parents[2] / "docs" / "examples" / "strategy.py:median")  # see docs/extending.md
# Learning rates that suit a random model of 60,000 weights: hundreds of times those of a real one.
LR = {
    "fedkseed": 3e-3, "fedkseed-pro": 3e-3, "fedkseed-plus": 3e-3, "fedkseed-backprop": 3e-3,
    "fedavg": 0.3, "fedzo": 3e-3, "fedmezo": 3e-3, "fedit": 1e-2, "fedunilora": 0.1,
    "fedit-sgd": 3.0, "fedptuning": 3.0, "fedprompt": 30.0, "unlimited-seeds": 3e-3, "uplink-seeds": 3e-3,
    "evofed": 0.01, "decomfl": 1.5e-3, "ferret": 0.05, OWN: 3e-3,
}  # fmt: skip
every_algorithm = pytest.mark.parametrize("name", [*ALGORITHMS, OWN], ids=lambda name: Path(name).name)


def recipe_of(name: str, tmp_path, model_folder, data_file, /, **changes: str):
    path = tmp_path / f"{Path(name).name}.toml"
    lines = {
        "algorithm": f'algorithm = "{name}"', "lr": f"lr = {LR[name]}", "steps": "steps = 10",
        "held_out": "held_out = 0.3", "generated": "generated = 0",
    }  # fmt: skip
    path.write_text(recipe_text(model_folder, data_file, **(lines | changes)))
    return load_recipe(path)


@every_algorithm
def test_training_lowers_the_held_out_loss_and_a_stopped_run_ends_the_same(name, tmp_path, model_folder, data_file):
    recipe = recipe_of(name, tmp_path, model_folder, data_file)
    whole = start(recipe, tmp_path / "whole")
    change = paired_change(whole.before.losses, whole.after.losses)
    assert change.mean < -2 * change.error, f"{change}"
    stopped = start(recipe, tmp_path / "stopped")
    assert stopped.digest == whole.digest
    Store(tmp_path / "stopped").rollback(2)
    assert resume(tmp_path / "stopped").digest == whole.digest
    assert Store(tmp_path / "stopped").reports()[-1]["bytes_total"] == whole.reports[-1]["bytes_total"]


def test_an_algorithm_of_ones_own_is_found_again_by_a_resumed_run_from_elsewhere_and_by_processes(
    tmp_path, model_folder, data_file, monkeypatch
):
    shutil.copy(OWN.rpartition(":")[0], tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of("fedkseed", tmp_path, model_folder, data_file, algorithm='algorithm = "mine.py:median"')
    whole, recipe = start(recipe, tmp_path / "run"), recipe.absolute()
    assert whole.reports[-1]["bytes_up"] == 76 + 4 * 10
    monkeypatch.chdir("/")
    Store(tmp_path / "run").rollback(1)
    assert resume(tmp_path / "run").digest == whole.digest
    processes = recipe.model_copy(update={"clients": recipe.clients.model_copy(update={"at_once": 2})})
    assert start(processes, tmp_path / "processes").digest == whole.digest
    assert Adapter.load(tmp_path / "run" / "adapter.safetensors").tuned == whole.digest
    assert measure(recipe, str(tmp_path / "mine.py:median")).bytes_up == 76 + 4 * 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:median", r"\[training\] algorithm = .*there is no file .*nowhere.py; correct the path"),
        ("mine.py:mean", "has no Algorithm 'mean'; its Algorithms are: median"),
        ("mine.py:Median", "has no Algorithm 'Median'; its Algorithms are: median"),
        ("mine.py", r"no algorithm is called 'mine.py'; choose one of fedkseed, .* or name your own as 'FILE.py:NAME'"),
    ],
)
def test_an_algorithm_of_ones_own_that_is_none_is_refused(
    name, message, tmp_path, model_folder, data_file, monkeypatch
):
    shutil.copy(OWN.rpartition(":")[0], tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedKSeedError, match=message):
        start(recipe_of("fedkseed", tmp_path, model_folder, data_file, algorithm=f'algorithm = "{name}"'), Path("run"))
    assert not Path("run").exists()


def test_reading_a_recipe_runs_nothing_that_it_names(tmp_path, model_folder, data_file):
    (tmp_path / "trap.py").write_text("raise SystemExit('run')")
    recipe_of("fedkseed", tmp_path, model_folder, data_file, algorithm=f'algorithm = "{tmp_path}/trap.py:trap"')


@pytest.mark.parametrize("name", ["fedkseed", "fedkseed-plus"])
def test_a_mixed_federation_trains_and_a_stopped_run_ends_the_same(name, tmp_path, model_folder, data_file):
    lines = {"alpha": "alpha = 1.0\nbackpropagating = 0.5", "eps": "eps = 1e-3\n[derivatives]\nlr = 3e-3\nsteps = 4"}
    recipe = recipe_of(name, tmp_path, model_folder, data_file, **lines)
    simulation = Simulation(recipe)
    setup, clients = simulation.setup, range(len(simulation.shares.clients))
    assert sum(setup.graph_of(number, len(clients)) == setup._graph_of_all_layers for number in clients) == 2
    whole = start(recipe, tmp_path / "whole")
    change = paired_change(whole.before.losses, whole.after.losses)
    assert change.mean < -2 * change.error, f"{change}"
    stopped = start(recipe, tmp_path / "stopped")
    Store(tmp_path / "stopped").rollback(1)
    assert resume(tmp_path / "stopped").digest == whole.digest == stopped.digest
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    apply(model, whole.output)
    assert Layout(model).digest().hex() == whole.digest


def test_only_fedkseed_and_its_kin_can_be_mixed(tmp_path, model_folder, data_file):
    lines = {"alpha": "alpha = 1.0\nbackpropagating = 0.5"}
    with pytest.raises(FedKSeedError, match=r"fedmezo does not read \[clients\] backpropagating: leave it out"):
        Simulation(recipe_of("fedmezo", tmp_path, model_folder, data_file, **lines))


def test_a_servers_optimiser_goes_on_after_a_stop(tmp_path, model_folder, data_file):
    lines = {"eps": 'eps = 1e-3\nserver = "adam"\nserver_lr = 3e-3'}
    recipe = recipe_of("fedkseed", tmp_path, model_folder, data_file, **lines)
    whole = start(recipe, tmp_path / "run")
    Store(tmp_path / "run").rollback(1)
    assert resume(tmp_path / "run").digest == whole.digest
    assert whole.reports[-1]["bytes_down"] == 88 + 64 + 4


def test_all_weights_are_left_as_a_folder_of_hugging_face(tmp_path, model_folder, data_file):
    recipe = recipe_of("fedavg", tmp_path, model_folder, data_file)
    result = start(recipe, tmp_path / "run")
    assert result.output == tmp_path / "run/model"
    again = AutoModelForCausalLM.from_pretrained(result.output)
    state = Store(tmp_path / "run").state(ALGORITHMS["fedavg"].strategy.state)
    written = torch.cat([p.detach().flatten() for _, p in sorted(again.named_parameters())])
    assert written.numpy().tobytes() == state.values.tobytes()
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "run"), "hello", "--max-new-tokens", "2"])
    assert done.exit_code == 0, done.output
    assert "--- tuned ---" in done.output


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers renames
def test_adapters_are_left_as_peft_writes_them_and_the_base_is_not_touched(tmp_path, model_folder, data_file):
    from peft import PeftModel

    result = start(recipe_of("fedit", tmp_path, model_folder, data_file, generated="generated = 2"), tmp_path / "run")
    assert result.output is not None
    assert json.loads((result.output / "adapter_config.json").read_text())["r"] == 8
    assert len(result.after.rouge) == 2
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    tuned = PeftModel.from_pretrained(base, result.output)
    state = Store(tmp_path / "run").state(ALGORITHMS["fedit"].strategy.state)
    lora = torch.cat([p.detach().flatten() for name, p in sorted(tuned.named_parameters()) if "lora_" in name])
    assert lora.numpy().tobytes() == state.values.tobytes()


@pytest.mark.parametrize("kind", PATTERNS)
def test_answers_do_not_depend_on_the_prompts_beside_them(kind, model_folder):
    tokenizer, model = load_tokenizer(str(model_folder)), tiny_llama()
    for p in model.parameters():
        p.mul_(4)  # so that answers depend on positions
    model = attach(model, kind, PeftTable(virtual_tokens=5), 1)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 30], [40, 41], [17, 18, 19, 20]]
    alone = [respond(model, tokenizer, [prompt], 12)[0] for prompt in prompts]
    assert respond(model, tokenizer, prompts, 12) == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize("name", ["fedavg", "fedit", "decomfl"])
def test_an_algorithm_that_writes_weights_refuses_quantised_ones_at_once(name, tmp_path, model_folder, data_file):
    recipe = recipe_of(name, tmp_path, model_folder, data_file)
    quantised = recipe.model_copy(update={"model": recipe.model.model_copy(update={"storage": "Q8_0"})})
    with pytest.raises(FedKSeedError, match=f"{name} can't tune a model whose weights are kept Q8_0"):
        Simulation(quantised)


def test_nothing_large_is_written_when_nobody_wants_it(tmp_path, model_folder, data_file):
    recipe = recipe_of("fedavg", tmp_path, model_folder, data_file, seed="seed = 3\nsave = false")
    assert start(recipe, tmp_path / "run").output is None
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize("kind", PATTERNS)
def test_the_same_seed_gives_the_same_adapters_and_the_global_generator_stays(kind):
    with torch.random.fork_rng():
        before = torch.random.get_rng_state()
        models = [attach(tiny_llama(), kind, PeftTable(virtual_tokens=4), seed) for seed in (1, 1, 2)]
        assert torch.equal(torch.random.get_rng_state(), before)
    one, same, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not any(p.requires_grad for p in models[0].parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
@pytest.mark.parametrize("kind", ["lora", "uni-lora"])
def test_lora_fits_every_architecture(config, kind):
    made = attach(AutoModelForCausalLM.from_config(config), kind, PeftTable(), 0)
    patterns = PATTERNS[kind]
    assert any(fnmatch(name, pattern) for name, _ in made.named_parameters() for pattern in patterns)


def test_modules_that_are_not_there_are_refused():
    with pytest.raises(FedKSeedError, match=r"can't have lora adapters.*targets"):
        attach(tiny_llama(), "lora", PeftTable(targets=["nowhere"]), 0)


def test_costs_are_those_of_messages_of_the_recipes_size(tmp_path, model_folder, data_file):
    recipe = recipe_of("fedkseed", tmp_path, model_folder, data_file)
    d = sum(p.numel() for p in tiny_llama().parameters())
    seeds, average, unlimited = (measure(recipe, name) for name in ("fedkseed", "fedavg", "unlimited-seeds"))
    assert seeds.trainable == average.trainable == unlimited.trainable == d
    assert seeds.bytes_down == seeds.bytes_back == 88 + 64 + 4
    assert seeds.bytes_up == 76 + 10 * 2
    assert average.bytes_down == average.bytes_back == 76 + 4 * d
    assert average.bytes_up == 88 + 4 * d
    pairs = 2 * 10  # of a cohort of two; 20 draws from 2^32 hardly meet
    assert unlimited.bytes_back > (ROUNDS_AWAY - 1) * 2 * 10 * 8
    assert unlimited.bytes_down == 84 + 4 + 8 * pairs
    assert unlimited.bytes_up == 76 + 10 * 4
    for costs in (seeds, average, unlimited):
        assert costs.step_seconds > 0
        assert costs.peak_memory > 0


@pytest.mark.parametrize("spared", ["[derivatives]\nsteps = 2\nlr = 1e-3", "[clients]\nbackpropagating = 0.5"])
def test_settings_of_the_recipes_own_algorithm_keep_no_other_from_being_measured(tmp_path, spared):
    text = '[model]\nname = "m"\n[data]\nsource = "d"\n[training]\nrounds = 1\nlr = 1.0\neps = 1.0\n'
    (tmp_path / "recipe.toml").write_text(text + spared)
    recipe = load_recipe(tmp_path / "recipe.toml")
    for name in ALGORITHMS:
        checked_algorithm(with_algorithm(recipe, name))
    private = recipe.model_copy(update={"secure": SecureTable(norm=1.0)})
    with pytest.raises(FedKSeedError, match=r"does not read \[secure\]"):
        checked_algorithm(with_algorithm(private, "unlimited-seeds"))


def test_what_can_not_be_measured_is_told_and_the_rest_is_measured(tmp_path, model_folder, data_file):
    recipe = recipe_of("fedkseed", tmp_path, model_folder, data_file, name=f'name = "{model_folder}"\nstorage = "Q8_0"')
    (fedavg, refusal), (fedkseed, costs) = compare(recipe, ["fedavg", "fedkseed"])
    assert (fedavg, fedkseed, costs.algorithm) == ("fedavg", "fedkseed", "fedkseed")
    assert "storage" in str(refusal)
