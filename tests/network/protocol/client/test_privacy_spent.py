"""A client's own account of privacy: no server, run or restart makes it spend more than its owner allows."""

from functools import partial
from tomllib import loads

import pytest

from fedkseed import FedKSeedError, Simulation, encode
from fedkseed.network.protocol.client.privacy_spent import PRIVACY_SPENT, spend_privacy
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.envelope import Reply, Status, Task, recipe_digest
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.recipe.reading import parse
from fedkseed.secure.accounting import epsilon_of

from ...flower.conftest import OPEN

RUN, OTHER = bytes(16), bytes(range(16))
FIRST, SECOND = b"1" * 32, b"2" * 32


def test_amounts_add_up_over_runs_and_a_repeated_answer_costs_nothing(tmp_path):
    once = spend_privacy(tmp_path, RUN, FIRST, 0.04, None, 1e-6)
    assert once == pytest.approx(epsilon_of(5.0, 1, 1e-6))
    assert spend_privacy(tmp_path, RUN, FIRST, 0.04, None, 1e-6) == once
    assert spend_privacy(tmp_path, OTHER, FIRST, 0.04, None, 1e-6) == pytest.approx(epsilon_of(5.0, 2, 1e-6))
    assert spend_privacy(tmp_path, RUN, SECOND, 0.01, None, 1e-6) == pytest.approx(epsilon_of(1.0, 0.09, 1e-6))


def test_what_passes_the_limit_is_refused_and_not_noted(tmp_path):
    most = epsilon_of(5.0, 2, 1e-6)
    spend_privacy(tmp_path, RUN, FIRST, 0.04, most, 1e-6)
    before = (tmp_path / PRIVACY_SPENT).read_bytes()
    with pytest.raises(FedKSeedError, match="the policy says epsilon"):
        spend_privacy(tmp_path, RUN, SECOND, 0.05, most, 1e-6)
    with pytest.raises(FedKSeedError, match="the policy says epsilon"):
        spend_privacy(tmp_path, RUN, FIRST, 0.09, most, 1e-6)  # the same round with less noise
    assert (tmp_path / PRIVACY_SPENT).read_bytes() == before
    spend_privacy(tmp_path, RUN, SECOND, 0.04, most, 1e-6)


@pytest.mark.parametrize("text", ["{", '{"ab": [1]}', '{"ab": {"0": "much"}}'])
def test_a_broken_account_stops_answers(tmp_path, text):
    (tmp_path / PRIVACY_SPENT).write_text(text)
    with pytest.raises(FedKSeedError, match=PRIVACY_SPENT):
        spend_privacy(tmp_path, RUN, FIRST, 0.04, None, 1e-6)
    assert (tmp_path / PRIVACY_SPENT).read_text() == text


def tasks(setting, extra: str):
    """A function from a nonce to the first task of a recipe, whose noise is for two of three rounds."""
    with_noise = Simulation(parse(loads(setting.text(more=extra))))
    strategy = with_noise.strategy
    message = encode(strategy.server.broadcast(strategy.server.init()))
    text = recipe_for_clients(with_noise.recipe, 3)
    return lambda nonce: Task(1, 600.0, recipe_digest(text), text, message, nonce=nonce).encode()


def limited(epsilon: float):
    return OPEN.model_copy(update={"training": OPEN.training.model_copy(update={"epsilon": epsilon})})


def test_a_server_gains_nothing_by_new_runs_of_the_same_recipe(setting, tmp_path, capsys):
    """The attack: the same round of as many runs as it takes to average the noise away."""
    task = tasks(setting, "[privacy]\nepsilon = 3.0\nnorm = 0.05\n")
    owner = setting.owner(1, policy=limited(3.0))
    worker = TaskHandler(partial(load_client, owner, ledger=tmp_path))
    replies = [worker.reply(task(bytes([k] * 16))) for k in range(5)]
    assert [reply.status for reply in replies] == [Status.DONE] * 3 + [Status.REFUSED] * 2  # of three rounds
    assert replies[-1] == Reply(Status.REFUSED, text="policy")
    assert "would bring what the client has spent to epsilon" in capsys.readouterr().err


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "[privacy]\nepsilon = 3.1\nnorm = 0.05\n",
        "[privacy]\nepsilon = 3.0\nnorm = 0.05\nsimulated = {clients = 1000, cohort = 10}\n",
        '[privacy]\nunit = "example"\nepsilon = 3.0\ndelta = 1e-5\nnorm = 0.05\n',
    ],
)
def test_an_owner_with_a_limit_answers_no_recipe_that_goes_beyond_it(setting, tmp_path, capsys, extra):
    owner = setting.owner(1, policy=limited(3.0))
    worker = TaskHandler(partial(load_client, owner, ledger=tmp_path))
    assert worker.reply(tasks(setting, extra)(RUN)) == Reply(Status.REFUSED, text="policy")
    assert "epsilon = 3" in capsys.readouterr().err
    assert not (tmp_path / PRIVACY_SPENT).exists()
