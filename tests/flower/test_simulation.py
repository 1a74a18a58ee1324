"""Flower's simulation engine: any recipe, the digest of one process. Ray listens on all interfaces: in a namespace."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedkseed import start
from fedkseed.recipe.reading import load_recipe

from ..conftest import recipe_text

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'flwr[simulation]'"),
    pytest.mark.skipif(
        not (shutil.which("unshare") and shutil.which("ip") and os.geteuid() == 0), reason="no network namespaces here"
    ),
]


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
