"""Flower's simulation engine: any recipe, the digest of one process. Ray listens on all interfaces: in a namespace."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tomllib import loads

import pytest

from fedkseed import FedKSeedError, start
from fedkseed.network.flower.simulation import Virtual, run
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.envelope import Status, recipe_digest
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.run.progress import Silent

from ...conftest import recipe_text
from .conftest import NODES


def test_a_process_of_the_engine_answers_for_any_client_of_a_recipe(setting):
    """Without Ray: the answers are those of the clients themselves, to the byte."""
    text = setting.text().encode()
    for client, node in enumerate(NODES):
        task = setting.first(client)
        expected = setting.workers()[node].reply(task.encode())
        reply = TaskHandler(Virtual).reply(replace(task, recipe=text, digest=recipe_digest(text)).encode())
        assert (reply.status, reply.message) == (Status.DONE, expected.message)


@pytest.mark.parametrize(
    "private",
    ['[privacy]\nunit = "example"\nepsilon = 8.0\nnorm = 1.0\n', "[privacy]\nepsilon = 8.0\n[secure]\nnorm = 1.0\n"],
)
def test_clients_that_add_noise_need_a_secret_that_the_engine_does_not_give(setting, tmp_path, private):
    with pytest.raises(FedKSeedError, match="the engine's processes share none: use --engine own"):
        run(parse(loads(setting.text(more=private))), tmp_path / "run", Silent())
    assert not (tmp_path / "run").exists()


@pytest.mark.network
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'flwr[simulation]'")
@pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("ip") and os.geteuid() == 0), reason="no network namespaces here"
)
@pytest.mark.parametrize("lines", [{}, {"algorithm": 'algorithm = "fedavg"', "count": "count = 4\nat_once = 2"}])
def test_the_simulation_engine_ends_with_the_digest_of_one_process(tmp_path, model_folder, data_file, lines):
    (tmp_path / "r.toml").write_text(recipe_text(model_folder, data_file, **lines))
    alone = start(load_recipe(tmp_path / "r.toml"), tmp_path / "alone")
    command = [Path(sys.executable).parent / "fedkseed", "run", tmp_path / "r.toml", "--output", tmp_path / "run"]
    script = f"ip link set lo up && exec {shlex.join(map(str, [*command, '--engine', 'flower']))}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=570, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"digest of the tuned model\W+([0-9a-f]{64})", done.stdout) == [alone.digest]
