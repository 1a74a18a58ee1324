"""A run in lines: by a real process beside a real run, and of views in which things change."""

import subprocess

from fedkseed.report.watch_lines import Teller
from fedkseed.report.watch_state import RunView
from fedkseed.run.activity import Activity
from fedkseed.run.round_metrics import line
from fedkseed.run.store import Store

from .conftest import SECONDS, command, environment

REPORT = {"round": 0, "clients": [1], "loss": 2.0, "skipped": 0, "scalar": 1.0, "bytes_down": 5, "bytes_up": 6}
REPORT |= {"bytes_total": 11}


def test_without_a_terminal_there_is_a_line_a_round_until_the_run_has_ended(begin, tmp_path):
    asked = command("watch", tmp_path / "run")
    with subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as watching:
        begin().end()
        text, _ = watching.communicate(timeout=SECONDS)
    assert watching.returncode == 0
    lines, store = text.decode().splitlines(), Store(tmp_path / "run")
    rounds = [one.partition("   about ")[0] for one in lines if one.startswith("round ")]
    assert rounds == [f"round {done:3} of 4   {line(report)}" for done, report in enumerate(store.reports(), 1)]
    scored = [one for one in lines if one.startswith(("base model", "after"))]
    assert [one.split("   ")[0] for one in scored] == ["base model", "after 2 rounds", "after 4 rounds"]
    for one, found in zip(scored, store.evaluations().values(), strict=True):
        assert f"held-out loss {sum(found['losses']) / len(found['losses']):.4f}" in one
    assert lines[-1] == "run: ended"
    assert len(lines) == len(set(lines))


def test_a_run_that_has_ended_is_said_whole_and_at_once(finished):
    done = subprocess.run(command("watch", finished), env=environment(), capture_output=True, check=True, text=True)
    assert [text.split()[0] for text in done.stdout.splitlines()] == [
        "base", "round", "round", "after", "round", "round", "after", "finished:"
    ]  # fmt: skip


def view(done: int, state="running", **more) -> RunView:
    return RunView("run", state, more.pop("text", state), planned=9, done=done, reports=[REPORT] * done, **more)


def test_every_line_is_said_once_and_a_rollback_is_said():
    said: list[str] = []
    teller, noted = Teller(said.append), Activity(notes=[(1.0, "client 3 is late")])
    for seen in (
        view(0), view(1, moment=noted, left=80.0), view(1, moment=noted), view(2, means={2: {"loss": 1.5}}),
        view(2, means={2: {"loss": 1.5}}), view(1), view(2, means={2: {"loss": 1.75}}), view(9, "ended"),
    ):  # fmt: skip
        teller.tell(seen)
    rounds = [text.partition("   clients")[0].partition("   held-out")[0] for text in said]
    assert rounds[:8] == [
        "run: running", "client 3 is late", "round   1 of 9", "round   2 of 9", "after 2 rounds",
        "back at 1 finished rounds", "round   2 of 9", "after 2 rounds",
    ]  # fmt: skip
    assert said[2].endswith("   about 1 min 20 s left")
    assert said[7] == "after 2 rounds   held-out loss 1.7500"
    assert rounds[8:] == [f"round {done:3} of 9" for done in range(3, 10)] + ["run: ended"]


def test_what_stopped_a_run_is_said_before_it_goes_on():
    said: list[str] = []
    teller = Teller(said.append)
    states = [view(1), view(1, "stopped", text="stopped: no space"), view(1, "stopped", text="stopped: no space")]
    assert [teller.tell(seen) for seen in [*states, view(2)]] == ["running", "stopped", "stopped", "running"]
    assert [text for text in said if text.startswith("run: ")] == [
        "run: running", "run: stopped: no space", "run: running"
    ]  # fmt: skip
