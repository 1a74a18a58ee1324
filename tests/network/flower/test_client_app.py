"""The ClientApp: a SuperNode's --node-config becomes the settings of a worker, to which tasks are handed."""

import pytest
from flwr.app import Context, Message, MessageType, RecordDict

from fedkseed import FedKSeedError
from fedkseed.network.flower import client_app
from fedkseed.network.flower.messages import client_number, packed, unpacked
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.client.recipe_consent import OwnerSettings
from fedkseed.network.protocol.envelope import Reply, Status

from .conftest import POLICY
from .loopback import name_message, name_task


def context(**config) -> Context:
    return Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})


def sent(kind: str) -> Message:
    name_task()
    message = Message(packed(b"a task"), 1, kind)
    name_message(message)
    return message


@pytest.fixture
def stopped(monkeypatch) -> list:
    """The directories whose workers were ended."""
    directories = []
    monkeypatch.setattr(client_app, "stop_worker", directories.append)
    return directories


def test_a_client_says_its_number():
    assert client_number(client_app.app(sent(MessageType.QUERY), context(**{"partition-id": 2}))) == 2
    with pytest.raises(FedKSeedError, match="--node-config 'partition-id=K"):
        client_number(client_app.app(sent(MessageType.QUERY), context()))


def test_a_task_is_handed_to_the_worker_of_the_nodes_own_settings(tmp_path, data_file, monkeypatch, stopped):
    (tmp_path / "policy.toml").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "keys", 1, ["localhost"], 2)
    handed = []
    monkeypatch.setattr(client_app, "ask_worker", lambda *task: handed.append(task) or b"its reply")
    config = {"partition-id": 0, "data": str(data_file), "state": "node", "policy": "policy.toml"}
    config |= {"key": "keys/client-0", "ca": "keys/ca.pem", "idle": 60}
    reply = client_app.app(sent(MessageType.TRAIN), context(**config))
    assert unpacked(reply) == b"its reply"
    assert handed == [(b"a task", tmp_path / "node")]
    settings = OwnerSettings.read(tmp_path / "node")
    assert (settings.key, settings.ca, settings.idle) == (
        str(tmp_path / "keys" / "client-0"), str(tmp_path / "keys" / "ca.pem"), 60.0,
    )  # fmt: skip
    assert settings.owner.policy.training.min_batch_size == 2
    assert not stopped[1:]
    client_app.app(sent(MessageType.TRAIN), context(**config))
    assert len(stopped) == 1, "a worker goes on with the same settings"
    client_app.app(sent(MessageType.TRAIN), context(**config | {"idle": 61}))
    assert stopped == [tmp_path / "node"] * 2, "and ends with others"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": ""}, r"--node-config lacks ['state']: data is this client's file"),
        ({"data": "nowhere.jsonl"}, "a client's data is a file of its own, there is none at nowhere.jsonl"),
        ({"polcy": "p.toml"}, "--node-config has no ['polcy']; it knows ['basis', 'ca', "),
        ({"key": "k", "ca": "c"}, "`fedkseed certs request` makes a key"),
        ({"key": "k"}, "a client has a key and a ca, or neither"),
        ({"idle": "30m"}, "idle must be a positive number, got '30m'"),
        ({"idle": 0}, "idle must be a positive number, got 0"),
    ],
)
def test_what_is_wrong_is_told_the_owner_and_the_server_gets_a_word(tmp_path, data_file, capsys, change, said):
    config = {"partition-id": 0, "data": str(data_file), "state": str(tmp_path / "node")} | change
    reply = Reply.decode(unpacked(client_app.app(sent(MessageType.TRAIN), context(**config))))
    assert (reply.status, reply.text) == (Status.REFUSED, "worker")
    assert said in capsys.readouterr().err
    assert not (tmp_path / "node").exists()
