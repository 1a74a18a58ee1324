"""Commands as a user runs them, in this process."""

import json
from typing import Any

from typer.testing import CliRunner

from fedkseed.cli import app

RUNNER = CliRunner()


def fedkseed(*arguments: object):
    return RUNNER.invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def refused(*arguments: object) -> str:
    """Run a command that must refuse; returns its one line."""
    result = fedkseed(*arguments)
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 2, result.output
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("fedkseed: ")
    return lines[0]


def documented(*arguments: object) -> Any:
    """The JSON document that a command prints, with nothing else on stdout."""
    result = fedkseed(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
