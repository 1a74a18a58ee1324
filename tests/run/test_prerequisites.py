"""Every command with every fault that needs no model: the reason, exit code 2, and PyTorch not even looked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedkseed import FedKSeedError
from fedkseed.models import place
from fedkseed.models.place import require_there
from fedkseed.recipe.reading import parse
from fedkseed.run.prerequisites import require_ready

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEAVY = ("torch", "numba", "transformers.modeling_utils")
# All commands in one process, in which a heavy package that is asked for is an error; packages are hidden by turns.
RUN_ALL = f"""
import json, os, sys
from pathlib import Path

sys.path.insert(0, {str(BENCHMARKS)!r})
from startup import cases, inputs
from typer.testing import CliRunner

from fedkseed.cli import app


class Refusing:
    def find_spec(self, name, path=None, target=None):
        assert name not in {HEAVY!r}, name


sys.meta_path.insert(0, Refusing())
folder, outcomes = Path(sys.argv[1]), []
os.chdir(folder)
inputs(folder)
for case in cases(folder):
    hidden, package = {{}}, case.fault.removeprefix("without ")
    if package != case.fault:
        hidden = {{name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == package}}
        sys.modules[package] = None
    done = CliRunner().invoke(app, case.arguments, env={{"COLUMNS": "200", "TERM": "dumb"}})
    if package != case.fault:
        del sys.modules[package]
        sys.modules.update(hidden)
    outcomes.append([case.command, case.fault, case.reason, done.exit_code, done.stderr, repr(done.exception)])
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    command = [sys.executable, "-c", RUN_ALL, str(tmp_path_factory.mktemp("faults"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_errors_that_need_no_model_come_before_pytorch_is_loaded(outcomes):
    assert len(outcomes) > 150
    wrong = [each for each in outcomes if each[3] != 2 or each[2] not in each[4] or each[5] != "SystemExit(2)"]
    assert wrong == []


def test_an_error_is_one_line(outcomes):
    several = [each[:2] + each[4:5] for each in outcomes if len(each[4].strip().splitlines()) != 1]
    assert several == []


def test_no_command_was_forgotten(outcomes):
    from fedkseed.cli import COMMANDS

    light = {"directions"}  # has no argument that can be wrong but a device, which PyTorch knows
    functions = [function for family in COMMANDS.values() for function in family]
    names = {function.__name__.replace("_", "-") for function in functions} - light
    assert names <= {command.split()[0] for command, *_ in outcomes}


def test_a_recipe_that_is_ready_is_let_through(model_folder, data_file):
    recipe = {"model": {"name": str(model_folder)}, "data": {"source": str(data_file), "held_out": 0.2}}
    recipe["clients"] = {"split": "even", "count": 3, "cohort": 2, "min_examples": 2}
    require_ready(parse(recipe))
    with pytest.raises(FedKSeedError, match="2 clients with at least 20 examples each need 40"):
        require_ready(parse(recipe | {"clients": {**recipe["clients"], "count": 2, "min_examples": 20}}))


def test_the_hub_is_asked_once_for_a_model_that_is_not_kept_here(monkeypatch):
    asked = []

    def model_info(api: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(FedKSeedError, match=r"no model at nobody/nothing: there is no such folder here, .*not known"):
        require_there("nobody/nothing")
    assert asked == ["nobody/nothing"]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert require_there("nobody/nothing") == place.ModelSource("nobody/nothing")
    assert asked == ["nobody/nothing"]
