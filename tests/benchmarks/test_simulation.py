"""The benchmark of simulated visits at its smallest size, and the work that frameworks share."""

import json
import subprocess
import sys

import pytest
import torch

from . import FOLDER

sys.path.insert(0, str(FOLDER))  # a benchmark is a script, not a module
sys.path.insert(0, str(FOLDER / "peers_simulation"))

import shared
import with_fedkseed

import simulation


@pytest.mark.parametrize(
    ("name", "weights"),
    [("cnn", 32 * 28 + 64 * 289 + 128 * 12545 + 10 * 129), ("lora", 8 * (12544 + 128) + 8 * (128 + 10))],
)
def test_a_model_has_the_weights_that_are_named_and_the_same_in_every_process(name, weights):
    one, other = shared.model(name), shared.model(name)
    assert sum(parameter.numel() for parameter in shared.tuned(one)) == weights
    assert f"{weights:,} weights" in " ".join(str(shared.__doc__).split())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_adapter_changes_nothing_before_it_is_trained():
    images = shared.users()[0][0][:2]
    assert torch.equal(shared.model("lora")(images), shared.model("cnn")(images))


def test_a_user_has_one_epoch_of_five_batches_of_ten():
    images, labels = zip(*shared.batches(shared.users()[7]), strict=True)
    assert [tuple(part.shape) for part in images] == 5 * [(10, 3, 32, 32)]
    assert [tuple(part.shape) for part in labels] == 5 * [(10,)]


def test_a_round_and_bare_training_take_turns_and_the_first_only_warms_up():
    done, cpu = [], iter([0.0, 1.0, 1.0, 3.0, 15.0, 15.0, 22.0, 22.0])
    meter = shared.Meter(lambda: done.append("bare"), lambda: next(cpu))
    meter.begin()
    for _ in range(2):
        done.append("round")
        meter.turn()
    assert done == ["round", "bare", "round", "bare"]
    assert [(turn[1], turn[3]) for turn in meter.turns] == [(12.0, 7.0)]


def test_the_processes_that_one_has_started_are_counted():
    before = shared.descendants()
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint('ready', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert shared.descendants() - before > 0.175  # two counts, of user and system, are each cut to hundredths
        child.communicate("\n")


def test_a_row_has_the_cost_of_a_visit_beyond_bare_training(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulation.py", "--only", "lora", "--rounds", "1", "--cohort", "2", "--json"])
    simulation.main()
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["task"] == "FedAvg of LoRA"
    assert row["framework"].startswith("fedkseed ")
    assert row["bare, ms a visit"] > 0
    assert row["visits a minute"] > 0


@pytest.mark.parametrize("task", ["fedkseed", "messages"])
def test_a_task_without_training_is_all_the_framework_s(task, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["with_fedkseed.py", task, "2", "3"])
    threads = torch.get_num_threads()
    try:
        with_fedkseed.main()
    finally:
        torch.set_num_threads(threads)
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert len(turns) == 2
    assert all(computed > bare for _, computed, _, bare in turns)


def test_a_framework_that_fails_ends_the_benchmark(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"with_pfl\.py lora 1 2 ended with status 3"):
        simulation.row("pfl", str(python), "lora", 1, 2)
