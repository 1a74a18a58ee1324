"""The README that a wheel carries: no link in it is relative, and each is of a file that is there."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_links_of_a_wheel_are_absolute_and_lead_to_files_that_are_there():
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    text = json.loads(done.stdout)["readme"]["text"]
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    ours = [link for link in links if link.startswith(address)]
    assert all(re.match(r"[a-z]+:|#", link) for link in links)
    assert len(ours) > 20
    for link in ours:
        kind, _, path = link.removeprefix(address + "/").partition("/HEAD/")
        assert kind == ("raw" if path.endswith(".png") else "blob")
        assert (ROOT / path.partition("#")[0]).exists(), link
