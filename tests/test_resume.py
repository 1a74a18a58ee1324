"""Kill the process at any moment, then resume: nothing shows."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedkseed import resume, start
from fedkseed.adapter import Adapter
from fedkseed.config import load_recipe
from fedkseed.store import Store

from .conftest import recipe_text

KILLS = 20


def run(recipe: Path, output: Path) -> bytes:
    start(load_recipe(recipe), output)
    return (output / "adapter.safetensors").read_bytes()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, model_folder, data_file) -> Path:
    path = tmp_path_factory.mktemp("resume") / "recipe.toml"
    path.write_text(recipe_text(model_folder, data_file, algorithm='algorithm = "fedkseed-pro"', rounds="rounds = 12"))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> bytes:
    return run(recipe, tmp_path_factory.mktemp("whole") / "run")


def test_two_runs_of_a_recipe_give_the_same_file(recipe, undisturbed, tmp_path):
    assert run(recipe, tmp_path / "run") == undisturbed


def test_a_process_killed_at_20_random_moments_and_resumed_gives_the_same_adapter_each_time(
    recipe, undisturbed, tmp_path
):
    """Each child says when its model is loaded, so that kills fall into rounds and commits, not into imports."""
    moments = random.Random(1)
    code = "import sys; from tests.test_resume import child; child(*sys.argv[1:])"
    done = []
    for number in range(KILLS):
        output = tmp_path / str(number)
        command = [sys.executable, "-c", code, str(recipe), str(output)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
            assert process.stdout is not None
            process.stdout.readline()  # the run begins
            time.sleep(moments.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        if not (output / "recipe.toml").exists():
            run(recipe, output)
        else:
            done.append(len(Store(output).reports()))
            resume(output)
        assert (output / "adapter.safetensors").read_bytes() == undisturbed, f"kill {number}"
    assert len({rounds for rounds in done if 0 < rounds < 12}) >= 2, (
        f"kills must fall into different rounds, got {done}"
    )


def child(recipe: str, output: str) -> None:
    """What the process that is killed does: say when it begins, then run."""
    from fedkseed.simulate import Simulation, work

    simulation = Simulation(load_recipe(recipe))
    simulation.client(0).loss(next(simulation.client(0).batches(0)))  # first use loads libraries
    print("ready", flush=True)
    with Store.create(Path(output), simulation.recipe.to_toml()) as store:
        work(store, simulation)


def test_rolled_back_and_resumed_gives_the_same_adapter(recipe, undisturbed, tmp_path):
    run(recipe, tmp_path / "run")
    store = Store(tmp_path / "run")
    store.rollback(5)
    assert len(store.reports()) == 5
    resume(tmp_path / "run")
    assert store.adapter.read_bytes() == undisturbed


def test_resuming_a_finished_run_changes_nothing(recipe, undisturbed, tmp_path):
    run(recipe, tmp_path / "run")
    result = resume(tmp_path / "run")
    assert (tmp_path / "run" / "adapter.safetensors").read_bytes() == undisturbed
    assert result.step_seconds is None
    assert Adapter.load(tmp_path / "run" / "adapter.safetensors").tuned == result.digest
