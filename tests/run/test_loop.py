"""Kill the process at any moment, then resume: nothing shows."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedkseed import resume, start
from fedkseed.recipe.reading import load_recipe
from fedkseed.round import Report
from fedkseed.run.store import Store
from fedkseed.run.watchers import Silent
from fedkseed.weights.adapter import Adapter

from ..conftest import recipe_text

KILLS, ROUNDS = 20, 12
SIGNS_OF_LIFE = 2 + ROUNDS * (2 * 3 + 1)  # evaluations before; of each round two clients with three steps, and its end


def run(recipe: Path, output: Path) -> bytes:
    start(load_recipe(recipe), output)
    return (output / "adapter.safetensors").read_bytes()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, model_folder, data_file) -> Path:
    path = tmp_path_factory.mktemp("resume") / "recipe.toml"
    path.write_text(
        recipe_text(model_folder, data_file, algorithm='algorithm = "fedkseed-pro"', rounds=f"rounds = {ROUNDS}")
    )
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> bytes:
    return run(recipe, tmp_path_factory.mktemp("whole") / "run")


def test_two_runs_of_a_recipe_give_the_same_file(recipe, undisturbed, tmp_path):
    assert run(recipe, tmp_path / "run") == undisturbed


def test_a_process_killed_at_20_random_moments_and_resumed_gives_the_same_adapter_each_time(
    recipe, undisturbed, tmp_path
):
    """A child tells of everything it does; it is killed a random while after a random one of these signs of life."""
    moments = random.Random(1)
    code = "import sys; from tests.run.test_loop import child; child(*sys.argv[1:])"
    done = []
    for number in range(KILLS):
        output = tmp_path / str(number)
        command = [sys.executable, "-c", code, str(recipe), str(output)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            for _ in range(moments.randrange(1, SIGNS_OF_LIFE)):
                process.stdout.readline()
            time.sleep(moments.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
        done.append(len(Store(output).reports()))
        resume(output)
        assert (output / "adapter.safetensors").read_bytes() == undisturbed, f"kill {number}"
    assert len({rounds for rounds in done if 0 < rounds < ROUNDS}) >= 3, (
        f"kills must fall into different rounds: {done}"
    )


class Lively(Silent):
    """Prints a line for every step, evaluation and round."""

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        print("step or evaluation", flush=True)

    def round_done(self, report: Report) -> None:
        print("round", flush=True)


def child(recipe: str, output: str) -> None:
    """What the process that is killed does: a run, as `fedkseed run` does it."""
    start(load_recipe(recipe), Path(output), Lively())


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
