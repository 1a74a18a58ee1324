"""Processes of Ray give what one process gives. Ray listens on all interfaces: its tests run in a namespace."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from fedkseed import start
from fedkseed.recipe.reading import load_recipe
from fedkseed.round import Round
from fedkseed.run.ray_actors import _Trainer
from fedkseed.run.simulation import Simulation, answering
from fedkseed.run.store import Store

from ..commands import refused
from ..conftest import recipe_text

TWO = {"count": "count = 5\nat_once = 2", "cohort": "cohort = 3\nthreads = 1"}
UNREAD = "[directions]", "family", "size", "eps"  # by FedAvg
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'fedkseed[ray]'")
needs_namespace = pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("ip") and os.geteuid() == 0), reason="no network namespaces here"
)


@pytest.fixture
def recipe(tmp_path, model_folder, data_file) -> Path:
    (tmp_path / "recipe.toml").write_text(recipe_text(model_folder, data_file, **TWO))
    return tmp_path / "recipe.toml"


def by_ray(*arguments: object, cluster: int = 0) -> subprocess.Popen[str]:
    """The command in a network of its own; `cluster`: with a cluster there of so many processors and a GPU."""
    programs = Path(sys.executable).parent
    command = shlex.join(map(str, [programs / "fedkseed", *arguments, "--engine", "ray"]))
    script = f"ip link set lo up && exec {command}"
    if cluster:
        ray, quiet = programs / "ray", ">/dev/null 2>&1"
        head = f"{ray} start --head --block --num-cpus {cluster} --num-gpus 1 --node-ip-address 127.0.0.1 --port 6379"
        script = (  # `ray stop` would end the clusters of others, too
            f"ip link set lo up; {head} {quiet} & head=$!; "
            f"until {ray} status --address 127.0.0.1:6379 {quiet}; do kill -0 $head || exit 1; sleep 1; done; "
            f"RAY_ADDRESS=127.0.0.1:6379 {command}; code=$?; kill $head; wait $head; exit $code"
        )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "TERM": "dumb"}
    return subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=environment,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=570)
    return f"{process.returncode}\n{output}"


def digest_in(said: str) -> list[str]:
    assert said.startswith("0\n"), said
    return re.findall(r"digest of the tuned model\W+([0-9a-f]{64})", said)


@pytest.mark.parametrize(
    "more",
    [
        "", '[privacy]\nepsilon = 8.0\nunit = "example"\nnorm = 1.0\n',
        "[privacy]\nepsilon = 8.0\n[secure]\nnorm = 1.0\n",
    ],
)  # fmt: skip
def test_an_actor_answers_for_any_client_of_a_recipe(recipe, more):
    """Without Ray: the answers are those of the clients themselves, to the byte, also of those that add noise."""
    recipe.write_text(recipe.read_text() + more)
    secret = bytes(range(32))
    simulation = Simulation(load_recipe(recipe), secret=secret)
    trainer = _Trainer(answering, simulation.recipe.to_toml(), secret, 1)
    assert trainer.identity() == simulation.identity
    begun = Round.begin(simulation.strategy, simulation.strategy.server.init(), range(5))
    for client, message in begun.whole.items():
        assert trainer.answer(message, client)[0] == simulation.answer(message, client)[0]


def test_without_ray_the_engine_tells_what_to_install(tmp_path, recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    asked = "run", recipe, "--output", tmp_path / "run", "--engine", "ray"
    assert "pip install 'fedkseed[ray]'" in refused(*asked)
    assert not (tmp_path / "run").exists()


@pytest.mark.network
@needs_ray
@needs_namespace
@pytest.mark.parametrize("lines", [TWO, {"algorithm": 'algorithm = "fedavg"'} | dict.fromkeys(UNREAD, "")])
def test_actors_end_with_the_model_of_one_process(tmp_path, model_folder, data_file, lines):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(model_folder, data_file, **lines))
    found = digest_in(ended(by_ray("run", recipe, "--output", tmp_path / "run")))
    assert found == [start(load_recipe(recipe), tmp_path / "alone").digest]


@pytest.mark.network
@needs_ray
@needs_namespace
@pytest.mark.parametrize("at_once", [1, 3])
def test_any_number_of_actors_ends_with_one_model(tmp_path, recipe, at_once):
    """Three of them share the GPU of the cluster: each asks for a third of it, or the second would wait for ever."""
    alone = start(load_recipe(recipe), tmp_path / "alone")
    recipe.write_text(recipe.read_text().replace("at_once = 2", f"at_once = {at_once}"))
    said = ended(by_ray("run", recipe, "--output", tmp_path / "run", cluster=3))
    assert digest_in(said) == [alone.digest]


@pytest.mark.network
@needs_ray
@needs_namespace
def test_a_cluster_is_the_one_of_the_address_and_says_what_it_lacks(tmp_path, recipe):
    output, alone = tmp_path / "run", start(load_recipe(recipe), tmp_path / "alone")
    for processors in (1, 2):
        said = ended(by_ray("run", recipe, "--output", output, cluster=processors))
        if processors == 1:
            assert "at_once = 2 processes of 1 threads need 2 processors, Ray has 1" in said
    assert digest_in(said) == [alone.digest]


@pytest.mark.network
@needs_ray
@needs_namespace
def test_a_run_goes_on_after_an_actor_was_killed(tmp_path, recipe):
    recipe.write_text(re.sub(r"rounds = \d+", "rounds = 60", recipe.read_text()))
    alone, output = start(load_recipe(recipe), tmp_path / "alone"), tmp_path / "run"
    process = by_ray("run", recipe, "--output", output)
    while not ((output / "run.sqlite").exists() and Store(output, looks=True).reports()):
        assert process.poll() is None, ended(process)
        time.sleep(0.05)
    everyone = psutil.Process(process.pid).children(recursive=True)
    next(child for child in everyone if "_Trainer" in " ".join(child.cmdline())).kill()
    said = ended(process)
    assert "fedkseed resume RUN --engine ray" in said, said
    assert 0 < len(Store(output, looks=True).reports()) < 60
    assert digest_in(ended(by_ray("resume", output))) == [alone.digest]
