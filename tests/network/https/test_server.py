"""The clients' keys, as a server over HTTPS takes them up while it runs."""

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.https import server
from fedkseed.network.https.connections import RequestError
from fedkseed.network.https.server import FOLDER, Registry, RekeyedError, Watching
from fedkseed.network.protocol.certs import add, make, request, revoke
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.network.protocol.signatures import private_key

from ...run import synthetic
from ..flower.conftest import Notes
from .test_connections import proof


@pytest.fixture
def keys(tmp_path):
    make(tmp_path / "keys", 3, ["localhost"], 2)
    return tmp_path / "keys"


@pytest.fixture
def registry(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "KEYS", -1.0)  # a look at each call
    synthetic.begin(tmp_path / "run", stop=0)
    (tmp_path / "run" / FOLDER).mkdir()
    return Registry(tmp_path / "run", keys, Notes())


def test_keys_are_numbered_written_down_and_looked_at(registry, keys):
    lines = registry.take()
    assert lines == [(keys / f"client-{number}.pub").read_text().strip() for number in range(3)]
    assert ClientNumbers(registry.directory, None).expected == {0, 1, 2}
    assert (registry.directory / FOLDER / "signing.json").exists()
    assert not registry.changed()
    revoke(keys, 1)
    assert registry.changed()


def test_a_key_that_is_in_use_twice_is_refused(registry, keys):
    (keys / "client-1.pub").write_text((keys / "client-0.pub").read_text())
    with pytest.raises(FedKSeedError, match=r"two clients of .* have the same key"):
        registry.take()


def test_a_run_goes_on_with_the_clients_that_it_began_with(registry, keys, tmp_path):
    registry.take()
    synthetic.begin(tmp_path / "begun", stop=1)
    (tmp_path / "begun" / FOLDER).mkdir()
    begun = Registry(tmp_path / "begun", keys, Notes())
    ClientNumbers.register(tmp_path / "begun", range(3))
    revoke(keys, 2)
    assert [bool(line) for line in begun.take()] == [True, True, False]
    assert ClientNumbers(tmp_path / "begun", None).expected == {0, 1}
    add(keys, request(tmp_path / "another"))
    assert [bool(line) for line in begun.take()] == [True, True, True]
    add(keys, request(tmp_path / "late"))
    assert len(begun.take()) == 3
    assert begun.progress.has("the run began with 3 clients; those that have come since take part in new runs")


def test_a_revoked_key_cannot_come_back(registry, keys):
    registry.take()
    kept = revoke(keys, 1)
    add_back = keys / "client-1.pub"
    another = request(keys.parent / "another")
    add_back.write_text(another.read_text())
    registry.take()
    add_back.write_text(kept.read_text())
    with pytest.raises(FedKSeedError, match=r"the key .*client-1.pub was revoked, and can't come back"):
        registry.take()


def test_rounds_end_and_begin_again_when_keys_have_changed(registry, keys):
    hub = Watching(registry)
    hub.renew()
    assert hub.nodes() == []
    (keys / "client-2.pub").write_text(request(keys.parent / "another").read_text())
    with pytest.raises(RekeyedError):
        hub.nodes()
    (keys / "client-2.pub").write_text("half a key")
    assert hub.nodes() == []
    assert registry.progress.has("can't be taken up")


def test_a_removed_key_has_no_request_answered_while_no_round_looks(registry, keys):
    hub = Watching(registry)
    hub.renew()
    key = private_key(keys / "client-1")
    number, token = hub.session(proof(hub, key))
    assert (number, hub.client(token)) == (1, 1)
    revoke(keys, 1)
    with pytest.raises(RequestError, match="the key is not registered any more"):
        hub.client(token)
    with pytest.raises(RequestError, match="the key is not registered any more"):
        hub.session(proof(hub, key))
    other = hub.session(proof(hub, private_key(keys / "client-0")))[1]
    assert hub.client(other) == 0


def test_a_server_with_a_page_waits_for_the_keys_that_are_made_on_it(registry, keys, monkeypatch):
    files = iter([request(keys.parent / name) for name in ("one", "two")])
    monkeypatch.setattr(server.time, "sleep", lambda seconds: add(keys, next(files)))
    registry.wait_for(5)
    assert [registry.progress.has(f"{have} of 5 clients have a key") for have in (3, 4, 5)] == [True, True, False]
    assert len(registry.take()) == 5
