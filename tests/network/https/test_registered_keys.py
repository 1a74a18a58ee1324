"""The clients' keys, as a server over HTTPS takes them up while it runs."""

from functools import partial
from pathlib import Path

import pytest

from fedkseed import FedKSeedError
from fedkseed.network.https import registered_keys
from fedkseed.network.https.connections import Connections, RequestError
from fedkseed.network.https.registered_keys import FOLDER, RegisteredKeys, RekeyedError, keys_of_run
from fedkseed.network.protocol.certs import add, make, request, revoke
from fedkseed.network.protocol.masking_keys import COMMENT
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.network.protocol.signatures import Audiences, private_key
from fedkseed.network.protocol.signatures import keys_of_run as kept_keys

from ...run import synthetic
from ..flower.conftest import Notes
from .test_connections import proof


@pytest.fixture
def keys(tmp_path):
    make(tmp_path / "keys", 3, ["localhost"], 2)
    return tmp_path / "keys"


def begun(directory: Path, keys: Path, stop: int) -> RegisteredKeys:
    """The keys of a run that has done some rounds."""
    synthetic.begin(directory, stop=stop)
    (directory / FOLDER).mkdir()
    return keys_of_run(directory, keys, Notes())


@pytest.fixture
def registered(keys, tmp_path, monkeypatch) -> RegisteredKeys:
    monkeypatch.setattr(registered_keys, "CHECKED_EVERY", -1.0)  # a look at each call
    return begun(tmp_path / "run", keys, stop=0)


def test_keys_are_numbered_written_down_and_looked_at(registered, keys):
    registered.register()
    assert registered.lines == [(keys / f"client-{number}.pub").read_text().strip() for number in range(3)]
    assert ClientNumbers(registered.directory, None).expected == {0, 1, 2}
    assert (registered.directory / FOLDER / "signing.json").exists()


def test_a_key_that_is_in_use_twice_is_refused(registered, keys):
    (keys / "client-1.pub").write_text((keys / "client-0.pub").read_text())
    with pytest.raises(FedKSeedError, match=r"two clients of .* have the same key"):
        registered.register()


def test_a_key_for_masks_of_low_order_is_refused_in_a_folder_that_holds_one_already(registered, keys):
    line, _, _ = (keys / "client-1.pub").read_text().partition(COMMENT)
    (keys / "client-1.pub").write_text(f"{line}{COMMENT}{bytes(32).hex()}\n")
    with pytest.raises(FedKSeedError, match=r"client-1.pub: 0{64} is no public key for masks"):
        registered.register()


def test_a_run_goes_on_with_the_clients_that_it_began_with(keys, tmp_path):
    registered = begun(tmp_path / "begun", keys, stop=1)

    def present() -> list[bool]:
        registered.register()
        return [bool(line) for line in registered.lines]

    ClientNumbers.register(tmp_path / "begun", range(3))
    revoke(keys, 2)
    assert present() == [True, True, False]
    assert ClientNumbers(tmp_path / "begun", None).expected == {0, 1}
    add(keys, request(tmp_path / "another"))
    assert present() == [True, True, True]
    add(keys, request(tmp_path / "late"))
    assert len(present()) == 3
    assert registered.progress.has("the run began with 3 clients; those that have come since take part in new runs")


def test_a_revoked_key_cannot_come_back(registered, keys):
    registered.register()
    kept = revoke(keys, 1)
    (keys / "client-1.pub").write_text(request(keys.parent / "another").read_text())
    registered.register()
    (keys / "client-1.pub").write_text(kept.read_text())
    with pytest.raises(FedKSeedError, match=r"client-1.pub was revoked and can't come back"):
        registered.register()


@pytest.fixture
def connections(registered) -> Connections:
    """The connections of the clients whose keys are registered."""
    connections = Connections(Audiences.of(registered.folder), (), has_key=registered.has)
    registered.take_up(connections)
    return connections


def test_a_key_in_two_hands_is_shown_with_its_name_and_the_commands_that_help(registered, connections, keys):
    (keys / "client-1.pub").unlink()
    add(keys, request(keys.parent / "ward 7"))
    registered.take_up(connections)
    connections.notices.extend([(1, "is there twice", True), (2, "has connected again", False)])
    registered.stop_if_changed(connections)
    assert registered.progress.told[-1] == "client 2 has connected again"
    assert registered.progress.has("client 1 (ward-7) is there twice; if that repeats, and its owner has not")
    assert registered.progress.has(f"`fedkseed certs revoke {keys} 1`")
    assert registered.progress.has(f"`fedkseed certs add {keys} NEW.pub`")


def test_rounds_end_and_begin_again_when_keys_have_changed(registered, connections, keys):
    look = partial(registered.stop_if_changed, connections)
    look()
    (keys / "client-2.pub").write_text(request(keys.parent / "another").read_text())
    with pytest.raises(RekeyedError):
        look()
    for change in (lambda: add(keys, request(keys.parent / "late")), lambda: revoke(keys, 1)):
        change()
        with pytest.raises(RekeyedError):
            look()


@pytest.mark.parametrize("part", [b"", b"half a key", b"ecdsa-sha2-nistp256 AAAAE2Vj", bytes(range(128, 256))])
def test_a_key_file_that_is_half_written_changes_nothing_and_is_read_again(registered, connections, keys, part):
    before = (registered.directory / FOLDER / "signing.json").read_bytes()
    (keys / "client-2.pub").write_bytes(part)
    registered.stop_if_changed(connections)
    assert registered.progress.has("can't be taken up")
    assert (registered.directory / FOLDER / "signing.json").read_bytes() == before
    (keys / "client-2.pub").write_bytes((another := request(keys.parent / "another")).read_bytes())
    with pytest.raises(RekeyedError):
        registered.stop_if_changed(connections)
    assert registered.lines[2] == another.read_text().strip()
    assert [len(held) for held in kept_keys(registered.directory)] == [1, 1, 2]


def test_a_removed_key_has_no_request_answered_while_no_round_looks(connections, keys):
    key = private_key(keys / "client-1")
    number, token = connections.session(proof(connections, key))
    assert (number, connections.client(token).number) == (1, 1)
    revoke(keys, 1)
    for ask in (lambda: connections.client(token), lambda: connections.session(proof(connections, key))):
        with pytest.raises(RequestError, match="the key is not registered any more"):
            ask()
    other = connections.session(proof(connections, private_key(keys / "client-0")))[1]
    assert connections.client(other).number == 0


def test_a_server_with_a_page_waits_for_the_keys_that_are_made_on_it(registered, keys, monkeypatch):
    files = iter([request(keys.parent / name) for name in ("one", "two")])
    monkeypatch.setattr(registered_keys.time, "sleep", lambda seconds: add(keys, next(files)))
    registered.wait_for(5)
    assert [registered.progress.has(f"{have} of 5 clients have a key") for have in (3, 4, 5)] == [True, True, False]
    registered.register()
    assert len(registered.lines) == 5
