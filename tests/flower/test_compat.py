"""What is needed of Flower, and what is told without it."""

import subprocess
import sys

import pytest

from fedkseed import FedKSeedError
from fedkseed.flower import compat
from fedkseed.flower.compat import require_flower


def test_without_flower_the_commands_tell_what_to_install(monkeypatch):
    require_flower()
    monkeypatch.setattr(compat, "version", lambda name: "1.99.0")
    with pytest.raises(FedKSeedError, match=r"Flower 1.99.0 is installed.*pip install 'fedkseed\[flower\]'"):
        require_flower()

    def missing(name):
        raise compat.PackageNotFoundError(name)

    monkeypatch.setattr(compat, "version", missing)
    with pytest.raises(FedKSeedError, match=r"needs Flower; install it with: pip install 'fedkseed\[flower\]'"):
        require_flower()


def test_importing_fedkseed_and_its_commands_needs_no_flower():
    modules = "fedkseed.cli, fedkseed.flower.cli, fedkseed.flower.compat, fedkseed.run.simulation"
    code = f"import sys; sys.modules['flwr'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
