"""The commands that look at a run: rounds, rollback, eval, generate, preview, verify, forget."""

import json
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedkseed import Adapter
from fedkseed.data.layouts import fit
from fedkseed.files import write_table
from fedkseed.recipe.reading import load_recipe
from fedkseed.report.terminal import console
from fedkseed.run.simulation import Simulation
from fedkseed.run.store import Store
from fedkseed.tuned.load import open_tuned
from fedkseed.weights.layout import Layout
from fedkseed.wire.numbers import rounded

from ..commands import documented, fedkseed, refused
from ..conftest import recipe_text
from ..encoding import encode
from ..run import synthetic


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


def test_eval_of_an_exported_folder_on_the_held_out_rows_gives_the_runs_numbers(finished, tmp_path, data_file):
    """The run draws 8 of the 12 rows of its held-out category: here are these 8."""
    simulation = Simulation(load_recipe(finished / "recipe.toml"))
    rows = [asdict(encoded.example) for encoded in simulation.shares.held_out]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = {done: found["losses"] for done, found in Store(finished).evaluations().items()}
    mean = sum(evaluations[3]) / 8
    for name, asked in (("hf", "hf"), ("gguf", "gguf --kind f32"), ("own", "fedkseed")):
        assert fedkseed("export", finished, tmp_path / name, "--format", *asked.split()).exit_code == 0
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


def test_a_terminal_without_room_for_all_columns_of_rounds_gets_the_first_and_is_told(finished, monkeypatch):
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "_height", 25)  # else a dumb terminal has 80 columns
    for width in (75, 80, 300):
        monkeypatch.setattr(console, "_width", width)
        printed = fedkseed("rounds", finished).stdout
        assert max(map(len, printed.splitlines()[:3])) <= width
        assert ("no room here for: processor seconds" in printed) == (width < 300)
        assert "virtual" not in printed, "clients are equally fast"
        assert all(name in printed for name in ("clients", "local", "held-out", "round"))


def test_runs_nearby_are_named_where_there_is_none(finished):
    for command in (
        ("rounds", finished.parent),
        ("resume", finished.parent / "x"),
        ("generate", finished.parent / "x", "y"),
    ):
        assert f"there are runs at {finished}" in refused(*command)


def test_eval_refuses_what_it_would_not_read(finished, data_file):
    assert "go with --data FILE" in refused("eval", finished, "--metrics", "accuracy")
    assert "leave it out, or --data" in refused("eval", finished, "--data", data_file, "--after", 1)
    assert "metrics are 'loss'" in refused("eval", finished, "--data", data_file, "--metrics", "bleu")
    line = refused("eval", finished, "--data", data_file, "--metrics", "rouge")
    assert "the metric 'rouge' scores written answers" in line


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


def test_the_mean_of_the_last_rounds_is_evaluated_generated_and_exported_alike(finished, tmp_path, data_file):
    strategy = Simulation(load_recipe(finished / "recipe.toml")).strategy
    states = [Store(finished).state(strategy.server.state, done) for done in (2, 3)]
    assert fedkseed("export", finished, tmp_path / "out", "--format", "fedkseed", "--ensemble", 2).exit_code == 0
    mean = Adapter.load(tmp_path / "out" / "adapter.safetensors").coefficients
    expected = rounded((states[0].coefficients + states[1].coefficients) / 2, strategy.settings.wire)
    assert np.array_equal(mean, expected.astype(mean.dtype))
    assert not np.array_equal(states[0].coefficients, states[1].coefficients)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| rounds | the mean of rounds 2 to 3 of 3 |" in card
    assert "## Measured" not in card
    ours = json.loads(fedkseed("eval", finished, "--ensemble", 2, "--json").stdout)
    alone = json.loads(fedkseed("eval", finished, "--json").stdout)
    assert ours["sets"] != alone["sets"]
    before = json.loads(fedkseed("eval", finished, "--ensemble", 1, "--after", 2, "--json").stdout)
    two = json.loads(fedkseed("eval", finished, "--ensemble", 2, "--after", 2, "--json").stdout)
    assert before["sets"] != two["sets"]
    shown = [
        re.search(r"held-out loss ([\d.]+ ± [\d.]+)", fedkseed("eval", *of, "--data", data_file).output)
        for of in ((finished, "--ensemble", 2), (tmp_path / "out",), (finished,))
    ]
    assert shown[0][1] == shown[1][1] != shown[2][1]
    answers = [fedkseed("generate", *of, "hello").output for of in ((finished, "--ensemble", 2), (tmp_path / "out",))]
    assert answers[0].partition("---")[2] == answers[1].partition("---")[2]


def test_a_mean_of_rounds_that_are_not_there_is_refused(finished):
    assert "has 3 rounds to take the mean of" in refused("eval", finished, "--ensemble", 4)
    assert "has 1 rounds to take the mean of" in refused("eval", finished, "--ensemble", 2, "--after", 1)
    assert "is no run's directory" in refused("generate", finished / "adapter.safetensors", "hello", "--ensemble", 2)


def test_generate_shows_base_and_tuned(finished):
    asked = ("How many legs has a cat?", "--max-new-tokens", 4)
    output = fedkseed("generate", finished / "adapter.safetensors", *asked).output
    assert output.index("--- base ---") < output.index("--- tuned ---")


@pytest.mark.parametrize("row", [{}, {"context": "Of cats."}, {"system": "Be short."}, {"context": "c", "system": "d"}])
def test_generate_asks_as_a_row_of_the_same_columns_does(finished, monkeypatch, row):
    prompts = []
    monkeypatch.setattr("fedkseed.evaluation.evaluate.respond", lambda *given: prompts.extend(given[2]) or [""])
    options = [part for name, text in row.items() for part in (f"--{name}", text)]
    assert fedkseed("generate", finished / "adapter.safetensors", "How many legs?", *options).exit_code == 0
    opened, learned = open_tuned(finished), {"instruction": "How many legs?", "response": "Four."} | row
    example = fit(learned, {}, None, "line 1").example(learned, "line 1")
    encoded = encode(example, opened.tokenizer(), opened.wording)
    assert prompts == [list(encoded.tokens[: encoded.prompt])] * 2


def test_generate_and_export_of_a_run_that_is_not_finished_take_its_last_round_and_say_so(copy, tmp_path):
    """Also while another process works on the run: what it writes is read as of its last commit."""
    assert fedkseed("rollback", copy, "--to", 1).exit_code == 0
    line = f"round 1 of 3; the run is not finished: `fedkseed resume {copy}` goes on"
    with Store(copy).locked():
        for command in (("generate", copy, "hello"), ("export", copy, tmp_path / "out"), ("verify", copy)):
            result = fedkseed(*command)
            assert result.exit_code == 0, result.stderr
            assert (line in result.output) == (command[0] != "verify")
    assert "digest of the tuned model none yet, the run is not finished" in result.output
    assert "| rounds | round 1 of 3; the run is not finished |" in (tmp_path / "out" / "README.md").read_text()
    assert fedkseed("rollback", copy, "--to", 0).exit_code == 0
    line = f"has no tuned model yet, since no round is finished; go on with: fedkseed resume {copy}"
    for command in (("generate", copy, "hello"), ("export", copy, tmp_path / "none")):
        assert line in refused(*command)


def test_an_adapter_for_another_base_is_refused_with_both_digests(finished, tmp_path, model_folder):
    other = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    other.model.norm.weight.data[0] += 1
    shutil.copytree(model_folder, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    line = refused("generate", finished, "hello", "--model", tmp_path / "other")
    assert Adapter.load(finished / "adapter.safetensors").base in line
    assert Layout(other).digest().hex() in line


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


def test_verify_says_what_follows_and_ends_with_2_where_something_does_not(finished, copy):
    result = fedkseed("verify", copy)
    assert result.exit_code == 0, result.output
    assert "3 rounds follow from 6 uploads, no signatures checked (its clients have no keys)" in result.output
    assert f"head {Store(copy).head(3).hex()}" in result.output
    digest = Adapter.load(copy).tuned
    assert f"digest of the tuned model {digest}" in result.output
    assert digest in (finished.parent / "printed.txt").read_text()  # by `run`
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
    lacking = "2 signatures NOT checked (the run has no signing.json, its clients' keys)"
    assert lacking in " ".join(result.output.split())


def test_forget_writes_a_new_run_that_other_commands_take(copy, tmp_path):
    cohorts = [report["clients"] for report in Store(copy).reports()]
    client = cohorts[0][0]
    left_out = sum(client in cohort for cohort in cohorts)
    new = tmp_path / f"run-without-{client}"
    result = fedkseed("forget", copy, "--client", client)
    assert result.exit_code == 0, result.output
    assert f"{new}: 3 rounds follow from {6 - left_out} uploads, {left_out} were left out" in result.output
    head = Store(new).head(3).hex()
    assert f"head {head}\nnot evaluated: fedkseed eval {new}\n" in result.output
    assert documented("forget", copy, "--client", client, "--output", tmp_path / "again")["head"] == head
    assert fedkseed("export", new, tmp_path / "out", "--format", "fedkseed").exit_code == 0
    assert f"| rounds | round 3 of 3; recomputed without client {client} |" in (tmp_path / "out/README.md").read_text()
    assert f"recomputed without client {client}, from a run with" in " ".join(fedkseed("rounds", new).output.split())
    assert f"3 rounds follow from {6 - left_out} uploads" in fedkseed("verify", new).output
    assert "exists already; choose another folder" in refused("forget", copy, "--client", client)
    alone = [argument for one in cohorts[0] for argument in ("--client", one)]
    assert f"round 1 of {copy} has uploads of clients" in refused("forget", copy, *alone, "--output", tmp_path / "none")
    with Store(copy).locked():
        assert "another process is working on" in refused("forget", copy, "--client", client)


def test_verify_does_not_ignore_what_a_client_has_seen_where_the_run_has_no_keys(copy, tmp_path):
    write_table(tmp_path / "history.json", {"00" * 16: [3, "00" * 32, "00" * 32, 0, "00" * 16]})
    assert "has seen nothing of" in refused("verify", copy, "--history", tmp_path / "history.json")
