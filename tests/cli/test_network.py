"""What the command refuses before it loads a model, and the certificates that it needs."""

import os
from pathlib import Path

import pytest
import tomli_w

from fedkseed.network.protocol.certs import add, make, request, sign

from ..commands import fedkseed, refused
from ..network.peers.test_roster import START


@pytest.fixture
def files(tmp_path, model_folder, data_file) -> Path:
    """A folder with all that peer 0 of two needs."""
    keys = tmp_path / "keys"
    make(keys, 0, ["localhost"], 2)
    for number in range(2):
        add(keys, request(tmp_path / f"key-{number}"))
        sign(keys, number, [], 2)
    peers = [{"key": (keys / f"client-{number}.pub").read_text().strip()} for number in range(2)]
    (tmp_path / "peers.toml").write_text(tomli_w.dumps({"start": START, "seconds": 5, "peers": peers}))
    recipe = {
        "model": {"name": str(model_folder)},
        "clients": {"split": "files", "cohort": 2},
        "training": {"rounds": 2, "steps": 4, "lr": 1e-3},
        "data": {"held_out": "capital"},
    }
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    (tmp_path / "rows.jsonl").write_text(data_file.read_text())
    return tmp_path


def refusal(files: Path, *changes: str, **options: object) -> str:
    """The line with which `fedkseed peer` ends."""
    given: dict[str, object] = {
        "peers": files / "peers.toml", "data": files / "rows.jsonl", "key": files / "key-0",
        "cert": files / "keys" / "client-0.pem", "ca": files / "keys" / "ca.pem", "listen": "127.0.0.1:1",
        "state": files / "state",
    }  # fmt: skip
    arguments = [part for name, value in (given | options).items() for part in (f"--{name}", value)]
    sets = [part for change in changes for part in ("--set", change)]
    return refused("peer", files / "recipe.toml", *arguments, *sets)


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ([], {"listen": "8443"}, "--listen takes HOST:PORT, as 0.0.0.0:8443, got '8443'"),
        ([], {"listen": "localhost:99999"}, "--listen takes HOST:PORT"),
        ([], {"data": "none.jsonl"}, "a client's data is a file of its own"),
        ([], {"key": "none"}, "there is no file none"),
        ([], {"peers": "none.toml"}, "can't read the peers' file"),
        (["clients.count=5", "clients.cohort=2"], {}, "[clients] count = 5, the peers' file has 2: leave count out"),
        (["training.algorithm=fedkseed-pro"], {}, "peers take fedkseed, fedkseed-plus and"),
        (["secure.norm=1.0"], {}, "[secure] needs a server"),
        (["clients.split=even"], {}, "every client has a file of its own: set split = 'files'"),
    ],
    ids=["listen", "port", "data", "key", "peers", "count", "pro", "secure", "split"],
)
def test_a_command_that_cannot_work_ends_with_one_line(files, changes, options, text):
    assert text in refusal(files, *changes, **options)


def test_keys_and_certificates_that_do_not_fit_are_refused(files):
    stranger = request(files / "stranger").with_suffix("")
    assert "is none of the 2 in" in refusal(files, key=stranger)
    assert "is not for the key" in refusal(files, cert=files / "keys" / "client-1.pem")
    os.chmod(files / "key-0", 0o644)
    assert "others can read the key" in refusal(files)


def test_a_server_with_fewer_keys_than_a_round_has_clients_says_how_more_come(files):
    asked = ["--set", "clients.cohort=3", "--certs", files / "keys", "--output", files / "run"]
    assert (
        f"has the keys of 2 clients: take in those of more (`fedkseed certs add {files / 'keys'} FILE.pub`)"
        in refused("serve", files / "recipe.toml", *asked)
    )
    assert f"goes on by: fedkseed serve {files / 'run' / 'recipe.toml'} --certs KEYS" in refused(
        "resume", files / "run"
    )


def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded(files):
    asked = ["--data", files / "rows.jsonl", "--key", files / "key-0", "--ca", files / "keys" / "ca.pem"]
    text = "the device 'cuda:99' can't be used ("
    assert text in refused("join", "https://localhost:1", *asked, "--device", "cuda:99")
    serve = ["serve", files / "recipe.toml", "--certs", files / "keys", "--output", files / "run"]
    assert text in refused(*serve, "--set", "model.device=cuda:99")
    assert not (files / "run").exists(), "nothing is begun"


def test_certificates_are_signed_by_a_command_once(files):
    add(files / "keys", request(files / "third"))
    command = ["certs", "sign", files / "keys", "2", "--host", "peer2.example.org"]
    assert fedkseed(*command).exit_code == 0
    assert (files / "keys" / "client-2.pem").read_text().startswith("-----BEGIN CERTIFICATE")
    assert "there is a file" in refused(*command)
    command[3] = "7"
    assert "client-7.pub, which is needed" in refused(*command)
