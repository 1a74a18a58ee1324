"""Benchmarks, each run as its own command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(FOLDER / script), *map(str, arguments)]


def rows_of(script: str, *arguments: object, status: int = 0) -> list[dict[str, Any]]:
    """The rows that a benchmark prints."""
    done = subprocess.run([*command(script, *arguments), "--json"], stdout=-1, text=True, check=False)
    assert done.returncode == status
    return json.loads(done.stdout)["rows"]
