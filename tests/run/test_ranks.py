"""Processes that torchrun starts give what one process gives, for any number of them, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedkseed import FedKSeedError
from fedkseed.recipe.reading import load_recipe
from fedkseed.run.ranks import Ranks, _reply
from fedkseed.run.start_and_resume import resume, start
from fedkseed.run.store import Store

from ..commands import refused
from ..conftest import recipe_text


def torchrun(ranks: int, *arguments: object, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    words = [*started, "-m", "fedkseed", *map(str, arguments), "--engine", "torch"]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=os.environ
    )


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    return f"{process.returncode}\n{output}"


@pytest.fixture
def recipe(tmp_path, model_folder, data_file) -> Path:
    """Three clients a round, of which one of two ranks has two."""
    (tmp_path / "recipe.toml").write_text(
        recipe_text(model_folder, data_file, count="count = 5", cohort="cohort = 3\nthreads = 1", rounds="rounds = 4")
    )
    return tmp_path / "recipe.toml"


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_ranks_end_with_the_model_and_the_bytes_of_one_process(tmp_path, recipe, ranks):
    start(load_recipe(recipe), tmp_path / "alone")
    said = ended(torchrun(ranks, "run", recipe, "--output", tmp_path / "ranks"))
    assert said.startswith("0\n"), said
    ours, theirs = ([{**r, "seconds": 0, "cpu_seconds": 0} for r in store.reports()] for store in (
        Store(tmp_path / "alone"), Store(tmp_path / "ranks")
    ))  # fmt: skip
    assert ours == theirs
    assert adapter(tmp_path / "ranks") == adapter(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [('"fedkseed"', '"fedzo"'), ("[evaluation]", '[trust]\nrule = "median"\n\n[evaluation]')]
)
def test_averages_of_weights_and_rules_that_need_every_upload_do_not_depend_on_ranks(tmp_path, recipe, changed):
    before, after = changed
    assert before in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(before, after))
    alone = start(load_recipe(recipe), tmp_path / "alone")
    said = ended(torchrun(2, "run", recipe, "--output", tmp_path / "ranks"))
    assert said.startswith("0\n"), said
    assert alone.digest
    assert Store(tmp_path / "ranks").reports()[-1]["loss"] == Store(tmp_path / "alone").reports()[-1]["loss"]
    assert resume(tmp_path / "ranks").digest == alone.digest


def adapter(run: Path) -> bytes:
    return (run / "adapter.safetensors").read_bytes()


@pytest.mark.parametrize(("restarts", "killed"), [("0", "1"), ("1", "1"), ("0", "0")])
@pytest.mark.slow
def test_a_run_goes_on_after_any_rank_was_killed(tmp_path, recipe, restarts, killed):
    recipe.write_text(recipe.read_text().replace("rounds = 4", "rounds = 40"))
    start(load_recipe(recipe), tmp_path / "alone")
    output = tmp_path / "ranks"
    process = torchrun(2, "run", recipe, "--output", output, options=("--max-restarts", restarts))
    while not ((output / "run.sqlite").exists() and Store(output, looks=True).reports()):
        assert process.poll() is None, ended(process)
        time.sleep(0.02)
    ranks = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == killed]
    os.kill(ranks[0].pid, signal.SIGKILL)
    said = ended(process)
    if restarts == "0":
        assert not said.startswith("0\n")
        assert 0 < len(Store(output, looks=True).reports()) < 40
        said = ended(torchrun(2, "resume", output))
    assert said.startswith("0\n"), said
    assert adapter(output) == adapter(tmp_path / "alone")


class Alone(Ranks):
    """Rank 0 of two, whose other rank's messages are given."""

    def __init__(self, replies: list[bytes], identity: dict[str, str]) -> None:
        self.rank, self.count, self._threads, self._sent = 0, 2, 1, []
        self._unchecked, self.replies = identity, replies
        self._answer = lambda data, client: (b"own", [0.5])

    def _send(self, data: bytes, rank: int) -> None: ...

    def _receive(self, rank: int) -> bytes:
        return self.replies.pop(0)


def _answering(data: bytes, client: int) -> tuple[bytes, list[float]]:
    if client == 3:
        raise RuntimeError("no memory")
    return data, [0.25, 0.5]


def test_a_rank_with_other_files_is_refused():
    """As of two machines whose files of one name differ."""
    ranks = Alone([json.dumps({"data of digest": "b"}).encode()], {"data of digest": "a"})
    with pytest.raises(FedKSeedError, match="rank 1 has data of digest b, rank 0 a: all machines need the same files"):
        list(ranks.answers({0: b"x", 1: b"x"}))


def test_an_error_of_a_client_is_said_with_its_rank():
    ranks = Alone([_reply(_answering, b"x", 1), _reply(_answering, b"x", 3)], {})
    answers = ranks.answers(dict.fromkeys(range(4), b"x"))
    assert [next(answers) for _ in range(3)] == [(0, b"own", [0.5]), (2, b"own", [0.5]), (1, b"x", [0.25, 0.5])]
    with pytest.raises(FedKSeedError, match="rank 1 failed: no memory"):
        next(answers)


def test_the_engine_is_of_processes_that_torchrun_started(tmp_path, recipe, monkeypatch):
    asked = ["run", recipe, "--output", tmp_path / "run"]
    assert "torchrun --nproc-per-node" in refused(*asked, "--engine", "torch")
    assert "--dry-run" in refused(*asked, "--engine", "torch", "--dry-run")
    assert "choose one of own, torch, ray" in refused(*asked, "--engine", "mpi")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "add --engine torch" in refused(*asked)
