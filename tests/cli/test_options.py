"""What all commands share: levels, exit codes, JSON alone on stdout, one line for a refusal."""

import numpy as np
import pytest

from fedkseed import Adapter
from fedkseed.run.store import Store

from ..commands import documented, fedkseed, refused


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
    after = documented("eval", finished)["sets"]["held-out"]["after"]
    assert after["loss"] == pytest.approx(np.mean(losses[3]["losses"]))
    assert documented("resume", tmp_path / "run")["digest"] == run["digest"]
    assert documented("verify", finished)["rounds"] == 3
    shares = documented("preview", recipe_file)
    assert sum(one["examples"] for one in shares["clients"]) == 24
    assert shares["held_out"] == 8
    assert all(row["wrong"] == [] and row["vectors"] > 0 for row in documented("directions"))
    assert {"figure-9", "table-3"} <= {row["name"] for row in documented("reproduce", "--list")}


def test_verbose_shows_where_an_error_arose(recipe_file):
    result = fedkseed("run", recipe_file, "--set", "model.name=/no/model", "-v")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("fedkseed: no model at /no/model")


def test_exit_codes_are_in_the_help():
    text = " ".join(fedkseed("--help").output.split())
    for code in ("0 done", "2 refused", "3 the run diverged", "130 stopped by Ctrl-C", "1 an error of the program"):
        assert code in text


def test_version_and_help():
    assert fedkseed("--version").output.startswith("fedkseed 0.")
    commands = "run resume rounds rollback eval export generate preview directions report compare tune reproduce "
    commands += "certs serve join shard peer"
    for command in commands.split():
        assert command in fedkseed("--help").output
        assert fedkseed(command, "--help").exit_code == 0
    assert "The recipe: a TOML file" in fedkseed("run", "--help").output
    assert "as [directions] size says" in fedkseed("basis", "--help").output, "a table's name is no style"


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


def test_a_run_whose_recipe_was_edited_is_refused(copy):
    recipe = copy / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 3", "steps = 4"))
    for command in ("resume", "eval", "rounds"):
        assert "has changed since the run began; bring the old one back, or start a new run" in refused(command, copy)
