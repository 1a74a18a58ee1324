"""The benchmark of a federation under attack: its arithmetic, what is done again, and what the hostile client sends."""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedkseed import decode, encode
from fedkseed.directions import Pool
from fedkseed.wire.numbers import rounded
from fedkseed.wire.records import Change, Run

from . import FOLDER

sys.path.insert(0, str(FOLDER))  # a benchmark is a script, not a module

import under_attack
from under_attack import differences, each_run, verdict


def one(seed: int, kind: str, losses: list[float], **more: Any) -> dict[str, Any]:
    """What a run leaves, with these losses after it, and each second choice right."""
    after = {"loss": losses, "choice": [float(k % 2) for k in range(len(losses))]}
    scores = {"before": {name: [9.0] * len(losses) for name in after}, "after": after}
    common = {"model": under_attack.MODEL, "factor": 100.0, "set": [*under_attack.SETTINGS]}
    facts = {"clients": [[0, 1, 2]], "norms": [0.0], "peak_mb": 1, "seconds": 2}
    return {**common, "seed": seed, "kind": kind, "scores": scores, **facts, **more}


def test_a_difference_has_errors_over_rows_and_over_seeds():
    alone = [one(seed, "alone", [1.0, 1.0]) for seed in range(3)]
    attacked = [one(seed, "attacked", [1.1 + shift, 1.3 + shift]) for seed, shift in enumerate((0.0, 0.1, 0.2))]
    loss, accuracy = differences([*alone, *attacked])
    assert float(loss["mean"]) == pytest.approx(0.3)
    assert float(loss["error over rows"]) == pytest.approx(0.1)  # of 0.2 and 0.4
    assert float(loss["error over seeds"]) == pytest.approx(0.1 / np.sqrt(3), abs=1e-4)  # of 0.2, 0.3 and 0.4
    assert loss["verdict"] == "worse"
    assert accuracy["verdict"] == "within the errors"


@pytest.mark.parametrize(
    ("mean", "better", "word"),
    [(0.2, 1, "within the errors"), (-0.2, 1, "within the errors"), (0.21, 1, "better"), (0.21, -1, "worse"),
     (-0.21, -1, "better")],
)  # fmt: skip
def test_a_verdict_is_of_two_errors_and_of_the_sign_that_improves(mean, better, word):
    assert verdict(mean, 0.1, better) == word


def test_one_run_of_a_seed_says_nothing_of_the_difference():
    assert differences([one(0, "alone", [1.0, 2.0]), one(1, "attacked", [1.0, 2.0])]) == []


def test_rounds_count_that_have_all_honest_clients():
    (row,) = each_run([one(0, "attacked", [1.0, 2.0], clients=[[0, 1, 2, 3], [0, 1, 3], [0, 1, 2]])])
    assert row["rounds with all honest clients"] == "2 of 3"


@pytest.fixture
def main(tmp_path, monkeypatch) -> Callable[..., list[tuple[int, str]]]:
    """The command, of two seeds; returns the runs that it does."""

    def call(*done: dict[str, Any]) -> list[tuple[int, str]]:
        out, runs = tmp_path / "runs.jsonl", list[tuple[int, str]]()
        out.write_text("".join(json.dumps(each) + "\n" for each in done))

        def record(options, folder):
            folder.mkdir(parents=True)
            runs.append((options["seed"], options["kind"]))
            return one(options["seed"], options["kind"], [1.0, 2.0])

        monkeypatch.setattr(under_attack, "record", record)
        places = ["--out", str(out), "--folder", str(tmp_path / "runs")]
        monkeypatch.setattr(sys, "argv", ["under_attack.py", "--seeds", "2", *places])
        under_attack.main()
        assert len(out.read_text().splitlines()) == len(done) + len(runs)
        return runs

    return call


def test_only_runs_that_are_not_there_are_done(main, capsys):
    there = [one(0, "attacked", [1.0, 2.0]), one(1, "alone", [1.0, 2.0]), one(1, "attacked", [1.0, 2.0], factor=10.0)]
    assert main(*there) == [(0, "alone"), (1, "attacked")]
    assert capsys.readouterr().out.count("within the errors") == 2


@pytest.mark.parametrize(("most", "norm"), [(1.0, 100 * 0.005), (0.3, np.hypot(0.3, 0.3))])
def test_the_hostile_client_sends_a_multiple_as_far_as_the_server_takes_it(monkeypatch, most, norm):
    from fedkseed.network.protocol.client import training_client
    from fedkseed.strategies import uploads

    run = Run(Pool(1, 2, "hadamard"), bytes(32))
    honest = Change(run, 0, 3, 5, 1.0, 0, rounded(np.array([0.003, -0.004]), "compact"), wire="compact")

    class Honest:
        def _train(self, *_: object) -> bytes:
            return encode(honest)

    Honest.setup = type("Setup", (), {"strategy": type("Strategy", (), {"settings": None})})  # type: ignore[attr-defined]
    monkeypatch.setattr(uploads, "largest_change", lambda settings, round_: most)
    names = {**vars(training_client), "TrainingClient": Honest, "log": lambda text: None}
    exec(under_attack.SCALED.replace("FACTOR", "100.0"), names)  # noqa: S102 - what is appended to a module
    sent = decode(Honest()._train(None, b"", None, None), Change)
    assert sent.values[0] > 0 > sent.values[1]
    assert np.linalg.norm(sent.values) == pytest.approx(norm, rel=0.01)
    assert sent.examples == honest.examples
