"""Kill the process at any moment, then resume: nothing shows."""

import contextlib
import math
import random
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tomllib import loads

import numpy as np
import pytest

from fedkseed import FedKSeedError, KSeed, LocalWork, Pool, Run, State, Upload, encode, resume, run_round, start
from fedkseed.evaluation.statistics import NOT_EVALUATED, Evaluation
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.round import Report
from fedkseed.run.loop import UNDONE, Federation, Finished, Result
from fedkseed.run.progress import Silent
from fedkseed.run.store import Store
from fedkseed.strategy import Settings
from fedkseed.weights.adapter import Adapter

from ..conftest import recipe_text
from . import synthetic

ROUNDS = 12
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


@pytest.mark.parametrize(
    "count", [6, pytest.param(20, marks=pytest.mark.slow(seconds=66, guards="a moment at which a kill loses a round"))]
)
def test_a_process_killed_at_random_moments_and_resumed_gives_the_same_adapter_each_time(
    recipe, undisturbed, tmp_path, count
):
    """A child tells of everything it does; it is killed a random while after a random one of these signs of life."""
    done = kills(recipe, undisturbed, tmp_path, count)
    assert len({rounds for rounds in done if 0 < rounds < ROUNDS}) >= 3, (
        f"kills must fall into different rounds: {done}"
    )


@pytest.mark.parametrize("count", [6, pytest.param(30, marks=pytest.mark.network)])
def test_a_run_with_masked_uploads_is_killed_and_resumed_alike(model_folder, data_file, tmp_path, count):
    path = tmp_path / "recipe.toml"
    path.write_text(
        recipe_text(model_folder, data_file, rounds="rounds = 4", cohort="cohort = 3") + "[secure]\nnorm = 0.1\n"
    )
    kills(path, run(path, tmp_path / "whole"), tmp_path, count)


def kills(recipe: Path, undisturbed: bytes, folder: Path, count: int) -> list[int]:
    """Kill a run at random moments and resume it; returns the rounds that were done each time."""
    moments, done = random.Random(1), []
    for number in range(count):
        output = folder / str(number)
        process, signs = begun(recipe, output)
        for _ in range(moments.randrange(1, SIGNS_OF_LIFE)):
            with contextlib.suppress(EOFError):  # the run has ended
                signs.recv_bytes()
        time.sleep(moments.uniform(0, 0.02))
        process.kill()
        process.join()
        done.append(len(Store(output).reports()))
        resume(output)
        assert (output / "adapter.safetensors").read_bytes() == undisturbed, f"kill {number}"
    return done


class Noted(Silent):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("trust", "directions", "said"),
    [("median", "", True), ("median", "shared = true\n", False), ("clipped", "", False)],
)
def test_a_rule_that_leaves_nothing_of_scalars_is_said(model_folder, data_file, tmp_path, trust, directions, said):
    text = recipe_text(model_folder, data_file, rounds="rounds = 1", size=f"size = 64\n{directions}")
    notes = Noted()
    start(parse(loads(f'{text}[trust]\nrule = "{trust}"\n')), tmp_path / "run", notes)
    assert any("leaves hardly anything" in note for note in notes.notes) is said


class Lively(Silent):
    """Sends a sign of life for every step, evaluation and round."""

    def __init__(self, signs: Connection) -> None:
        self.signs = signs

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.signs.send_bytes(b"step or evaluation")

    def round_done(self, report: Report) -> None:
        self.signs.send_bytes(b"round")


def child(recipe: Path, output: Path, signs: Connection) -> None:
    """Run a recipe, as `fedkseed run` does it, in the process that is killed."""
    start(load_recipe(recipe), output, Lively(signs))


def begun(recipe: Path, output: Path) -> tuple[BaseProcess, Connection]:
    """A process that runs a recipe, and its signs of life, which end with it."""
    processes = get_context("forkserver")  # which imports once what each child needs
    processes.set_forkserver_preload([__name__])
    signs, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=child, args=(recipe, output, theirs))
    process.start()
    theirs.close()
    return process, signs


def test_rolled_back_and_resumed_gives_the_same_adapter(recipe, undisturbed, tmp_path):
    run(recipe, tmp_path / "run")
    store = Store(tmp_path / "run")
    store.rollback(5)
    assert len(store.reports()) == 5
    resume(tmp_path / "run")
    assert store.adapter.read_bytes() == undisturbed


@dataclass
class Scored:
    """An evaluator whose losses are given, by the number of rounds done."""

    losses: dict[int, float]

    def evaluate(self, state, what, write) -> Evaluation:
        return Evaluation([self.losses[state.round], self.losses[state.round] + 1], [], [])

    def finish(self, state, store) -> Finished:
        return Finished(None)


def guarded(directory: Path, losses: dict[int, float], guard: float) -> Result:
    tables = {"trust": {"guard": guard}, "training": {"rounds": 6}, "evaluation": {"every": 2}}
    recipe, run = parse({"model": {"name": "none"}} | tables), Run(Pool(1, 8, "hadamard"), bytes(32))
    strategy = KSeed.make(Settings(run, LocalWork(rounds=6, steps=2), wire="exact"))

    def next_round(state, state_after, broadcasts):
        upload = Upload(run, state.round, 5, 1, 1.0, np.ones(2, np.float32))
        return run_round(strategy, state, [5], lambda sent: [(5, encode(upload))])

    return synthetic.carry_on(
        directory, recipe.to_toml(), Federation(recipe, strategy, {"a": "b"}, next_round, Scored(losses))
    )


@pytest.mark.parametrize("bad", [9.0, math.nan])
def test_a_run_that_is_destroyed_goes_back_to_its_last_good_round_and_says_which_clients_took_part(tmp_path, bad):
    losses = {0: 7.9, 2: 7.6, 4: bad, 6: 11743.0}
    with pytest.raises(FedKSeedError, match=r"after 4 rounds .* The run is back at 2 finished rounds.*clients \[5\]"):
        guarded(tmp_path / "run", losses, 0.5)
    store = Store(tmp_path / "run")
    assert (kept := store.state(State)) is not None and kept.round == 2  # noqa: PT018
    assert sorted(store.evaluations()) == [0, 2]
    (undone,) = store.recall(UNDONE)
    assert [report["round"] for report in undone["reports"]] == [2, 3]
    after = guarded(tmp_path / "run", {**losses, 4: 7.9, 6: 7.5}, 0.5)  # as with other clients
    assert np.mean(after.after.losses) == 8.0
    assert [report["round"] for report in after.reports] == [*range(6)]


def test_a_guard_looks_at_the_last_round_too_and_lets_small_rises_pass(tmp_path):
    with pytest.raises(FedKSeedError, match=r"after 6 rounds the held-out loss is 9\.0000.*back at 4 finished"):
        guarded(tmp_path / "run", {0: 7.9, 2: 7.6, 4: 7.8, 6: 8.5}, 0.5)
    assert guarded(tmp_path / "other", {0: 7.9, 2: 7.6, 4: 8.0, 6: 7.7}, 0.5).reports


class Unscored:
    """An evaluator without held-out rows."""

    def evaluate(self, state, what, write) -> Evaluation:
        return NOT_EVALUATED

    def finish(self, state, store) -> Finished:
        raise AssertionError("an adapter of zeros is written")


@pytest.mark.parametrize(("rounds", "steps"), [(2, 4), (9, 6)])
def test_a_run_of_whose_first_rounds_no_step_has_a_finite_loss_is_no_success(tmp_path, rounds, steps):
    recipe = parse({"model": {"name": "none"}, "training": {"rounds": rounds}})
    run = Run(Pool(1, 8, "hadamard"), bytes(32))
    strategy = KSeed.make(Settings(run, LocalWork(rounds=rounds, steps=2), wire="exact"))

    def next_round(state, state_after, broadcasts):
        upload = Upload(run, state.round, 5, 1, math.nan, np.full(2, np.nan, np.float32))
        return run_round(strategy, state, [5], lambda sent: [(5, encode(upload))])

    federation = Federation(recipe, strategy, {"a": "b"}, next_round, Unscored())
    first = f"nothing was learned: none of the {steps} steps of the first {steps // 2} rounds"
    with pytest.raises(FedKSeedError, match=first):
        synthetic.carry_on(tmp_path / "run", recipe.to_toml(), federation)


def test_resuming_a_finished_run_changes_nothing(recipe, undisturbed, tmp_path):
    run(recipe, tmp_path / "run")
    result = resume(tmp_path / "run")
    assert (tmp_path / "run" / "adapter.safetensors").read_bytes() == undisturbed
    assert result.step_seconds is None
    assert Adapter.load(tmp_path / "run" / "adapter.safetensors").tuned == result.digest
