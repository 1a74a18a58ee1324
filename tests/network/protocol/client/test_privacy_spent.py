"""A user's account of privacy: no server, run, state folder or added row makes a row spend more than is allowed."""

import json
import stat
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tomllib import loads

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError, Simulation, encode
from fedkseed.data.layouts import Example, row_digest
from fedkseed.files import write_table
from fedkseed.network.protocol.client import privacy_spent
from fedkseed.network.protocol.client.privacy_spent import EARLIER, LEDGER, PrivacyLedger, ledger_path
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.envelope import Reply, Status, Task, recipe_digest
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.recipe.reading import parse
from fedkseed.round import Round
from fedkseed.run.cohort import cohort
from fedkseed.secure.accounting import epsilon_of
from fedkseed.secure.member import MaskingClient
from fedkseed.strategies.masked import simulated_key

from ...accounts import amounts
from ...flower.conftest import OPEN

ROWS = frozenset({b"a" * 32, b"b" * 32})
FIRST, SECOND, SECRET = b"1" * 32, b"2" * 32, bytes(range(32))
OF_CLIENTS = "[privacy]\nepsilon = 3.0\nnorm = 0.05\n"
OF_ROWS = '[privacy]\nunit = "example"\nepsilon = 3.0\nnorm = 0.05\n'


@pytest.fixture
def ledger(tmp_path) -> PrivacyLedger:
    return PrivacyLedger(tmp_path / "state" / LEDGER, b"server")


def test_amounts_add_up_and_a_repeated_answer_costs_nothing(ledger):
    once = ledger.spend(ROWS, FIRST, 0.04, None, 1e-6)
    assert once == pytest.approx(epsilon_of(5.0, 1, 1e-6))
    assert ledger.spend(ROWS, FIRST, 0.04, None, 1e-6) == once
    assert replace(ledger, server=b"other").spend(ROWS, FIRST, 0.04, 0.01, 1e-6) == once, "it is given already"
    assert ledger.spend(ROWS, SECOND, 0.01, None, 1e-6) == pytest.approx(epsilon_of(1.0, 0.05, 1e-6))
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700


def test_what_passes_the_limit_is_refused_and_not_noted(ledger):
    most = epsilon_of(5.0, 2, 1e-6)
    ledger.spend(ROWS, FIRST, 0.04, most, 1e-6)
    for _ in range(2):
        with pytest.raises(FedKSeedError, match=r"what 2 of the client's 2 rows have spent .* the policy says epsilon"):
            ledger.spend(ROWS, SECOND, 0.05, most, 1e-6)
        assert amounts(ledger.path) == (1, 0.04)
    ledger.spend(ROWS, SECOND, 0.04, most, 1e-6)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sets(st.integers(0, 6), min_size=1), st.floats(1e-4, 0.1)), min_size=1, max_size=8))
def test_sets_of_rows_that_overlap_add_up_row_by_row(tmp_path_factory, answers):
    """Against a slow definition: of each row the sum of the answers that it was part of."""
    ledger, epsilon = PrivacyLedger(tmp_path_factory.mktemp("ledger") / LEDGER), 2.0
    spent = np.zeros(7)
    for number, (rows, amount) in enumerate(answers):
        part = spent + amount * np.isin(np.arange(7), [*rows])
        worst = epsilon_of(1.0, max(part[row] for row in rows), 1e-6)
        names = frozenset(bytes([row]) * 32 for row in rows)
        if worst > epsilon:
            with pytest.raises(FedKSeedError, match="the policy says epsilon = 2"):
                ledger.spend(names, bytes([number]) * 32, amount, epsilon, 1e-6)
        else:
            assert ledger.spend(names, bytes([number]) * 32, amount, epsilon, 1e-6) == pytest.approx(worst)
            spent = part


def test_a_row_is_known_again_in_another_file_by_its_text():
    row = Example("What is it?", "A cat.", "Seen  here", "animals")
    for same in (replace(row, category=""), replace(row, context="seen here"), replace(row, response="a cat")):
        assert row_digest(same) == row_digest(row)
    others = replace(row, response="A dog."), replace(row, instruction="What is it? A cat.", response="")
    assert len({row_digest(row), *map(row_digest, others)}) == 3


def test_no_server_fills_the_ledger_for_another(ledger, monkeypatch):
    """The attack: rounds with next to no ε each, until no answer can be noted, and so none be given."""
    monkeypatch.setattr(privacy_spent, "MOST_ANSWERS", 5)
    for number in range(5):
        ledger.spend(ROWS, bytes([number]) * 32, 1e-30, 1.0, 1e-6)
    with pytest.raises(FedKSeedError, match="has 5 answers to this server, no more are given"):
        ledger.spend(ROWS, FIRST, 1e-30, 1.0, 1e-6)
    ledger.spend(ROWS, bytes(32), 1e-30, 1.0, 1e-6)  # a repeated one
    replace(ledger, server=b"other").spend(ROWS, FIRST, 1e-30, 1.0, 1e-6)


def _spend(path: Path, number: int) -> None:
    PrivacyLedger(path).spend(ROWS, bytes([number]) * 32, 1.0, None, 1e-6)


def test_processes_of_a_user_that_write_at_once_lose_nothing(ledger):
    with get_context("fork").Pool(4) as pool:
        pool.starmap(_spend, [(ledger.path, number) for number in range(24)])
    assert amounts(ledger.path) == (24, 24.0)


@pytest.mark.parametrize("data", [b"{", b"SQLite format 3\0" + bytes(84), b"x" * 5000])
def test_a_broken_or_missing_ledger_stops_answers(ledger, data):
    ledger.path.parent.mkdir()
    ledger.path.write_bytes(data)
    with pytest.raises(FedKSeedError, match=rf"can't write the account of privacy .*{LEDGER}.*get it back from a copy"):
        ledger.spend(ROWS, FIRST, 0.04, None, 1e-6)
    assert ledger.path.read_bytes() == data
    ledger.path.unlink()
    ledger.path.symlink_to("elsewhere")
    with pytest.raises(FedKSeedError, match="can't write the account of privacy"):
        ledger.spend(ROWS, FIRST, 0.04, None, 1e-6)


def test_the_account_that_an_older_release_has_kept_in_a_state_folder_counts(ledger, tmp_path):
    write_table(tmp_path / EARLIER, {"00": {"aa": 0.04, "bb": 0.04}, "01": {"aa": 0.02}})
    later = replace(ledger, client=tmp_path)
    later.spend(ROWS, FIRST, 0.01, None, 1e-6)
    later.spend(ROWS | {b"c" * 32}, SECOND, 0.01, None, 1e-6)
    assert amounts(ledger.path)[1] == pytest.approx(0.12)
    for text in ("{", '{"ab": [1]}', '{"ab": {"0": "much"}}'):
        (tmp_path / EARLIER).write_text(text)
        with pytest.raises(FedKSeedError, match=EARLIER):
            later.spend(ROWS, FIRST, 0.04, None, 1e-6)


def test_the_ledger_is_the_users_and_its_place_that_of_the_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ledger_path() == tmp_path / "fedkseed" / LEDGER
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "a/relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert ledger_path() == tmp_path / "home" / ".local" / "state" / "fedkseed" / LEDGER


def tasks(setting, extra: str):
    """A function from a nonce to a task of a recipe's first round, whose noise is for all of three rounds."""
    recipe = parse(loads(setting.text(more=extra)))
    with_noise = Simulation(recipe, secret=SECRET)
    strategy, text = with_noise.strategy, recipe_for_clients(with_noise.recipe, 3)
    drawn = cohort(recipe.seed, 0, 3, 3, recipe.clients.draw)
    message = Round.begin(strategy, strategy.server.init(), drawn).whole[1]
    if "[secure]" not in extra:
        message = encode(strategy.server.broadcast(strategy.server.init()))
    return lambda nonce: Task(1, 600.0, recipe_digest(text), text, message, nonce=nonce).encode()


def limited(epsilon: float):
    return OPEN.model_copy(update={"training": OPEN.training.model_copy(update={"epsilon": epsilon})})


def worker_of(owner, ledger: PrivacyLedger, said: list[str]) -> TaskHandler:
    def masks(number: int, nonce: bytes) -> MaskingClient:
        return MaskingClient(number, simulated_key(int.from_bytes(SECRET, "little"), number), nonce)

    def disclose(code: str, text: str) -> str:
        said.append(text)
        return str(code)

    return TaskHandler(partial(load_client, owner, masks=masks, ledger=ledger), disclose=disclose)


@pytest.mark.parametrize("extra", [OF_ROWS, OF_CLIENTS + "[secure]\n"], ids=["rows", "masked"])
def test_nothing_forgets_what_rows_have_spent(setting, tmp_path, ledger, extra):
    """The attack: three rounds are allowed; then other runs, an added row, a new --state: it was 2.92 in place of 2."""
    if "[secure]" in extra:
        extra = extra.replace("norm = 0.05\n", "") + "norm = 0.05\n"
    task, said = tasks(setting, extra), list[str]()
    file = tmp_path / "rows.jsonl"
    file.write_text(setting.files[1].read_text())
    owner = replace(setting.owner(1, policy=limited(3.0), secret=1), data=str(file))
    replies = [worker_of(owner, ledger, said).reply(task(bytes([k] * 16))) for k in range(3)]
    assert [reply.status for reply in replies] == [Status.DONE] * 3, said
    assert worker_of(owner, ledger, said).reply(task(bytes(16))).status is Status.DONE, "the first answer again"
    row = {"instruction": "A new one?", "response": "Yes.", "category": "colour"}
    for attempt, secret in (("", 1), ("", 2), (json.dumps(row) + "\n", 1), (json.dumps(row) + "\n", 2)):
        file.write_text(attempt + setting.files[1].read_text())
        for nonce in (bytes(16), b"n" * 16):
            if (attempt, secret, nonce) == ("", 1, bytes(16)):
                continue
            reply = worker_of(replace(owner, secret=secret), ledger, said).reply(task(nonce))
            assert reply == Reply(Status.REFUSED, text="policy")
            assert "rows have spent to epsilon = 3." in said[-1]
    assert amounts(ledger.path)[0] == 3
    file.write_text("".join(json.dumps({**row, "instruction": f"Is it {k}?"}) + "\n" for k in range(12)))
    assert worker_of(owner, ledger, said).reply(task(b"n" * 16)).status is Status.DONE, "other rows have spent nothing"


@pytest.mark.parametrize(
    "extra",
    [
        "",
        OF_CLIENTS,  # noise that the server adds, or says to add
        "[privacy]\nepsilon = 3.1\n[secure]\nnorm = 0.05\n",
        OF_CLIENTS + "simulated = {clients = 1000, cohort = 10}\n",
        OF_ROWS.replace("norm", "delta = 1e-5\nnorm"),
    ],
)
def test_an_owner_with_a_limit_answers_no_recipe_that_goes_beyond_it(setting, ledger, capsys, extra):
    owner = setting.owner(1, policy=limited(3.0), secret=1)
    worker = TaskHandler(partial(load_client, owner, ledger=ledger))
    assert worker.reply(tasks(setting, extra)(bytes(16))) == Reply(Status.REFUSED, text="policy")
    assert "epsilon = 3" in capsys.readouterr().err
    assert not ledger.path.exists()
