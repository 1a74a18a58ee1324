"""The ServerApp on a loopback Grid: the rounds of a run, and SuperNodes that say which client they are."""

from functools import partial

import pytest
from flwr.app import Context, RecordDict

from fedkseed import FedKSeedError
from fedkseed.network.flower import server_app
from fedkseed.network.flower.server_app import run_rounds
from fedkseed.network.protocol.client.recipe_consent import OwnerSettings
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.receipt_checks import signature_check
from fedkseed.run.store import Store
from fedkseed.run.verify import verify

from . import loopback
from .conftest import NODES, Notes, to_workers
from .loopback import LoopbackGrid

COUNTED = {"count": 'split = "files"\ncount = 3'}


def run(grid: LoopbackGrid, **config: object) -> None:
    """Start the ServerApp as Flower does."""
    values = {name: str(value) for name, value in config.items()}
    server_app.app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=values))


def test_an_app_ends_with_the_digest_of_one_process_and_once_more_when_it_is_started_again(
    setting, undisturbed, tmp_path, capsys
):
    (tmp_path / "recipe.toml").write_text(setting.text("minimum = 3", **COUNTED))
    for _ in range(2):
        grid = LoopbackGrid(lambda: NODES, setting.deliver())
        run(grid, recipe=tmp_path / "recipe.toml", run=tmp_path / "run", certs="")
        printed = capsys.readouterr().out
        assert f"digest of the tuned model: {undisturbed.digest}" in printed
        assert "3 of 3 clients have kept the tuned model" in printed
    (tmp_path / "recipe.toml").write_text(setting.text("minimum = 3", **COUNTED, rounds="rounds = 4"))
    with pytest.raises(FedKSeedError, match=r"holds a run of another recipe .* only \[network\] and \[report\]"):
        run(LoopbackGrid(lambda: NODES, setting.deliver()), recipe=tmp_path / "recipe.toml", run=tmp_path / "run")


def test_an_app_with_keys_signs_its_tasks_and_takes_answers_of_these_keys_alone(setting, keys, tmp_path):
    (tmp_path / "recipe.toml").write_text(setting.text("minimum = 2"))
    workers, notes = {}, Notes()
    for number, node in enumerate(NODES):
        owner, key = setting.owner(number), keys / f"client-{number if number < 2 else 0}"
        (tmp_path / str(number)).mkdir()
        signing = OwnerSettings(owner, 1.0, str(key), str(keys / "ca.pem")).signing(tmp_path / str(number))
        workers[node] = TaskHandler(partial(load_client, owner), signing)
    grid = LoopbackGrid(lambda: NODES, to_workers(workers))
    run_rounds(tmp_path / "recipe.toml", tmp_path / "run", keys, grid, notes)
    assert notes.has("round 1: client 2 refuses: task"), "it has another client's key"
    assert [report["clients"] for report in Store(tmp_path / "run").reports()] == [[0, 1]] * 3
    assert verify(Store(tmp_path / "run"), signature_check(Store(tmp_path / "run"))).rounds == 3


def test_a_supernode_with_another_id_after_a_restart_is_the_same_client(setting, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(loopback, "number_of", lambda node: 2 if node == 444 else NODES.index(node))
    deliver, notes, killed = setting.deliver(), Notes(), []

    def dying(message):
        if message.metadata.dst_node_id == 333 and message.metadata.group_id == "2":
            killed.append(True)
        elif message.metadata.dst_node_id == 444:
            message.metadata.__dict__["_dst_node_id"] = 333
            (reply,) = deliver(message)
            reply.metadata.__dict__["_src_node_id"] = 444
            yield reply
        else:
            yield from deliver(message)

    def nodes():
        return (*NODES, 444) if killed else NODES  # Flower lists the old one for a minute

    result = setting.serve(setting.begin(tmp_path / "run", "minimum = 3"), dying, nodes, notes)
    assert result.digest == undisturbed.digest
    assert notes.has("client 2 is SuperNode 444 now, and was 333")
    assert notes.has("round 2: client 2 did not answer: its SuperNode was started again")


def test_a_supernode_that_does_not_say_which_client_it_is_is_named_once_and_left_out(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(loopback, "number_of", lambda node: None if node == 333 else NODES.index(node))
    notes, directory = Notes(), setting.begin(tmp_path / "run", "minimum = 2\npatience = 0.5")
    result = setting.serve(directory, notes=notes)
    assert [report["clients"] for report in result.reports] == [[0, 1]] * 3
    said = "SuperNode 333 does not say which client it is: start it with --node-config"
    assert sum(said in line for line in notes.told) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"count": "count = 4"}, r"set split = 'files'"),
        (COUNTED | {"algorithm": 'algorithm = "decomfl"'}, "have to remember every round"),
        ({}, r"how many clients are there\? Set \[clients\] count"),
    ],
)
def test_what_flower_can_not_carry_is_refused_with_a_sentence(setting, tmp_path, changes, match):
    (tmp_path / "recipe.toml").write_text(setting.text(**changes))
    with pytest.raises(FedKSeedError, match=match):
        run(LoopbackGrid(lambda: NODES, setting.deliver()), recipe=tmp_path / "recipe.toml", run=tmp_path / "run")


def test_an_app_without_a_recipe_says_how_it_is_named(tmp_path):
    with pytest.raises(FedKSeedError, match=r"--run-config 'recipe=\"FILE\" run=\"DIRECTORY\"'"):
        run(LoopbackGrid(lambda: NODES, lambda message: ()))
