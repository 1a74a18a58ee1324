"""The history that clients keep of a run: servers that change the past, go back, or show two clients two of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedkseed import FedKSeedError, encode
from fedkseed.files import read_table, write_table
from fedkseed.network.protocol.envelope import LINK, Task
from fedkseed.network.protocol.run_history import HISTORY_FILE, MOST_RUNS, RunHistory, SeenRun, read_history
from fedkseed.run import digest_chain as chain
from fedkseed.run.store import Store

from ...run import synthetic

NONCE, OTHER = bytes(range(16)), bytes(range(16, 32))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Store:
    return synthetic.begin(tmp_path_factory.mktemp("history") / "run")


@pytest.fixture(scope="module")
def forged(tmp_path_factory) -> Store:
    """The same run, with another upload in round 2."""
    return synthetic.begin(tmp_path_factory.mktemp("history") / "run", sign=lambda done, *_: b"x" * (done == 1))


def task(store: Store, done: int, since: int = 0, nonce: bytes = NONCE) -> Task:
    """A task about the state after `done` rounds, with the links from that after `since` rounds on."""
    links, head, stem = store.history(since, done)
    joined = b"".join(links)
    return Task(0, 1.0, bytes(16), b"", b"", nonce, since=since, links=joined, head=head, stem=stem)


def known(store: Store, done: int) -> SeenRun:
    """The last that client 0 has seen of a run after `done` rounds."""
    return SeenRun(done, store.head(done), chain.link_of(store.row(done).parts), 0, bytes(16))


def broadcast(store: Store, done: int, **changes: float) -> bytes:
    """The broadcast that is made of the state after `done` rounds, or one with other numbers."""
    strategy = synthetic.federation(store.recipe.read_text()).strategy
    message = strategy.server.broadcast(store.state(strategy.server.state, done))
    return encode(replace(message, **changes))


def test_a_client_follows_round_after_round_and_its_file_says_so(run, tmp_path):
    for done in range(4):
        assert RunHistory(tmp_path).follow(task(run, done, done)), "by another process each time"
        assert read_history(tmp_path / HISTORY_FILE) == {NONCE.hex(): known(run, done)}


def test_a_client_that_has_missed_rounds_needs_the_links_since(run, tmp_path):
    history = RunHistory(tmp_path)
    assert history.follow(task(run, 1))
    assert not history.follow(task(run, 4, 4)), "links are lacking: it asks for all"
    assert read_history(history.path) == {NONCE.hex(): known(run, 1)}
    assert history.follow(task(run, 4, 2))
    assert read_history(history.path) == {NONCE.hex(): known(run, 4)}
    for since in (0, 4, 5, 0):  # the same once more, and with all links, since the server has been restarted
        assert history.follow(task(run, 4, since))


def test_a_client_that_lacks_everything_gets_all_links_with_the_recipe(run, tmp_path):
    history = RunHistory(tmp_path)
    assert not history.follow(task(run, 5, 5))
    assert not history.path.exists()
    assert history.follow(task(run, 5))
    assert read_history(history.path) == {NONCE.hex(): known(run, 5)}


def test_a_server_that_goes_back_in_silence_is_refused(run, tmp_path):
    history = RunHistory(tmp_path)
    history.follow(task(run, 4))
    for since in (0, 3):
        with pytest.raises(
            FedKSeedError, match="the server is back at round 3, this client has seen the state after 4"
        ):
            history.follow(task(run, 3, since))
    assert read_history(history.path) == {NONCE.hex(): known(run, 4)}


def test_a_server_that_has_changed_a_past_round_is_refused(run, forged, tmp_path):
    assert run.head(1) == forged.head(1)
    assert run.head(2) != forged.head(2), "the forgery begins in round 2"
    history = RunHistory(tmp_path)
    history.follow(task(run, 3))
    for since in (0, 2, 4):
        with pytest.raises(FedKSeedError, match="the run's history up to round 5 is another than the one that this"):
            RunHistory(tmp_path).follow(task(forged, 5, since))
    assert history.follow(task(run, 5, 4)), "the true one goes on"


def test_a_client_that_saw_nothing_of_what_was_changed_goes_on(run, forged, tmp_path):
    history = RunHistory(tmp_path)
    history.follow(task(run, 1))
    assert history.follow(task(forged, 4, 2))


def test_a_server_that_shows_two_clients_two_histories_leaves_two_heads(run, forged, tmp_path):
    histories = [RunHistory(tmp_path / str(number)) for number in range(2)]
    for history, store in zip(histories, (run, forged), strict=True):
        history.path.parent.mkdir()
        assert history.follow(task(store, 4))
    heads = [read_history(history.path)[NONCE.hex()] for history in histories]
    assert heads[0] != heads[1]
    for history, store in zip(histories, (forged, run), strict=True):
        with pytest.raises(FedKSeedError, match="shows its clients different ones"):
            history.follow(task(store, 5, 5))


@pytest.mark.parametrize("at", range(0, 4 * LINK, 7))
def test_a_changed_link_or_head_is_refused_and_nothing_is_kept(run, tmp_path, at):
    genuine = task(run, 3)
    links = genuine.links[:at] + bytes([genuine.links[at] ^ 1]) + genuine.links[at + 1 :]
    for forged in (
        replace(genuine, links=links),
        replace(genuine, head=bytes(LINK)),
        replace(genuine, links=genuine.links[LINK:]),
        replace(genuine, links=b""),
    ):
        with pytest.raises(FedKSeedError, match="is another than the one"):
            RunHistory(tmp_path).follow(forged)
    assert not (tmp_path / HISTORY_FILE).exists()


def test_a_server_that_goes_back_by_the_command_begins_another_history(run, tmp_path):
    """`fedkseed rollback` draws another nonce: the client goes on, and its file has both."""
    history = RunHistory(tmp_path)
    history.follow(task(run, 4))
    assert history.follow(task(run, 2, nonce=OTHER))
    assert read_history(history.path) == {NONCE.hex(): known(run, 4), OTHER.hex(): known(run, 2)}
    with pytest.raises(FedKSeedError, match="the server is back"):
        history.follow(task(run, 3, 3))


def test_a_round_has_one_broadcast_however_often_and_by_whichever_worker_it_is_asked_for(run, tmp_path):
    """The attack: the same client trains on two chosen models in one round, and the server subtracts its answers."""
    history = RunHistory(tmp_path)
    asked = task(run, 2)
    assert history.follow(asked)
    history.require_bound(asked, chain.digest(broadcast(run, 2)))
    for again in (task(run, 2), task(run, 2, 1), task(run, 2, 3), replace(task(run, 2), stem=bytes(LINK))):
        for restarted in (history, RunHistory(tmp_path)):
            assert restarted.follow(again)
            with pytest.raises(FedKSeedError, match="the broadcast of round 3 is not the one in the run's history"):
                restarted.require_bound(again, chain.digest(broadcast(run, 2, lr=1.0)))
            if again.stem != bytes(LINK):
                restarted.require_bound(again, chain.digest(broadcast(run, 2)))
    with pytest.raises(FedKSeedError, match="is not the one in the run's history"):
        history.require_bound(asked, chain.digest(broadcast(run, 1)))


def test_two_clients_get_one_broadcast_after_one_head(run, tmp_path):
    """The attack: one head for both, which each of them signs, and another model for the second."""
    for number, changes in enumerate(({}, {"eps": 1.0})):
        (tmp_path / str(number)).mkdir()
        history, asked = RunHistory(tmp_path / str(number)), replace(task(run, 3), client=number)
        assert history.follow(asked)
        if changes:
            with pytest.raises(FedKSeedError, match="is not the one in the run's history"):
                history.require_bound(asked, chain.digest(broadcast(run, 3, **changes)))
        else:
            history.require_bound(asked, chain.digest(broadcast(run, 3)))


def test_a_stem_that_is_made_for_another_broadcast_gives_another_link(run, tmp_path):
    """The attack: the stem is the server's to choose; its links and head are as they were."""
    history, other = RunHistory(tmp_path), broadcast(run, 2, lr=1.0)
    for stem in (run.row(2).parts[: chain.SIZE], chain.digest(other), chain.link_of(run.row(2).parts), b"\xff" * LINK):
        forged = replace(task(run, 2), stem=stem)
        assert history.follow(forged)
        with pytest.raises(FedKSeedError, match="is not the one in the run's history"):
            history.require_bound(forged, chain.digest(other))


def test_a_run_whose_history_was_not_followed_has_no_broadcast(run, tmp_path):
    history, asked = RunHistory(tmp_path), task(run, 2, 2)
    assert not history.follow(asked)
    with pytest.raises(FedKSeedError, match="is not the one in the run's history"):
        history.require_bound(asked, chain.digest(broadcast(run, 2)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"client": 1}, "this client is 0 in this run, and the task is for 1"),
        ({"digest": b"x" * 16}, "a run has one recipe"),
    ],
    ids=["number", "recipe"],
)
def test_a_client_keeps_its_number_and_its_recipe_in_a_run_when_it_is_started_again(run, tmp_path, change, match):
    """The attack: with another number the same rows are asked along other directions; with a recipe, as it says."""
    assert RunHistory(tmp_path).follow(task(run, 2))
    for done in (2, 3):
        with pytest.raises(FedKSeedError, match=match):
            RunHistory(tmp_path).follow(replace(task(run, done), **change))
    assert read_history(tmp_path / HISTORY_FILE) == {NONCE.hex(): known(run, 2)}
    assert RunHistory(tmp_path).follow(replace(task(run, 2, nonce=OTHER), **change)), "of another run"


def test_a_run_is_not_forgotten_for_runs_without_end(run, tmp_path, monkeypatch):
    """The attack: a nonce for each task, until the run is driven out; then one of its rounds with another model."""
    monkeypatch.setattr("fedkseed.network.protocol.run_history.MOST_RUNS", 8)
    asked = RunHistory(tmp_path)
    nonces = [number.to_bytes(16, "big") for number in range(9)]
    for nonce in nonces[:8]:
        assert asked.follow(task(run, 2, nonce=nonce))
    full = asked.path.read_bytes()
    for client in (asked, RunHistory(tmp_path)):
        with pytest.raises(FedKSeedError, match="has 8 runs of this server, no more of it are followed"):
            client.follow(task(run, 0, nonce=nonces[8]))
        with pytest.raises(FedKSeedError, match="is not the one in the run's history"):
            client.require_bound(task(run, 2, nonce=nonces[0]), chain.digest(broadcast(run, 2, lr=0.5)))
        client.require_bound(task(run, 2, nonce=nonces[0]), chain.digest(broadcast(run, 2)))
    assert asked.path.read_bytes() == full
    assert asked.follow(task(run, 3, nonce=nonces[0])), "a run that it knows goes on"
    assert len(read_history(asked.path)) == 8
    assert len(full) < 8 * 300
    assert MOST_RUNS * 375 < 100_000, "what a client writes in each round, with its server's name"


def test_no_server_fills_the_history_for_another(run, tmp_path, monkeypatch):
    """The attack: as many made-up runs as go, so that the client of two federations follows neither."""
    monkeypatch.setattr("fedkseed.network.protocol.run_history.MOST_RUNS", 8)
    for number in range(8):
        assert RunHistory(tmp_path).follow(task(run, 2, nonce=number.to_bytes(16, "big")), b"junk")
    with pytest.raises(FedKSeedError, match="has 8 runs of this server"):
        RunHistory(tmp_path).follow(task(run, 2, nonce=b"9" * 16), b"junk")
    assert RunHistory(tmp_path).follow(task(run, 2, nonce=OTHER), b"honest")
    assert RunHistory(tmp_path).follow(task(run, 3, nonce=OTHER), b"honest")
    seen = read_history(tmp_path / HISTORY_FILE)
    assert sorted(one.server for one in seen.values()) == [b"honest", *[b"junk"] * 8]


def test_a_history_of_an_older_release_is_read(run, tmp_path):
    assert RunHistory(tmp_path).follow(task(run, 2))
    table = read_table(tmp_path / HISTORY_FILE)
    write_table(tmp_path / HISTORY_FILE, {nonce: fields[:5] for nonce, fields in table.items()})
    assert RunHistory(tmp_path).follow(task(run, 3), b"server")
    assert read_history(tmp_path / HISTORY_FILE)[NONCE.hex()] == replace(known(run, 3), server=b"server")


DAMAGED = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe{}",
    "a list": b"[]",
    "a number": b"5",
    "no list in it": json.dumps({"00": 5}).encode(),
    "no number of rounds": json.dumps({"00": ["a", "00" * 32]}).encode(),
    "a fraction of rounds": json.dumps({"00": [1.5, "00" * 32]}).encode(),
    "infinitely many rounds": b'{"00": [1e999, "' + b"00" * 32 + b'"]}',
    "rounds before the first": json.dumps({"00": [-2, "00" * 32]}).encode(),
    "a head that is no number": json.dumps({"00": [1, "xy"]}).encode(),
    "a head that is cut": json.dumps({"00": [1, "00" * 31]}).encode(),
    "a head of another type": json.dumps({"00": [1, 7]}).encode(),
    "nested without end": b'{"00": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, content):
    """A client that took it for no history would follow a server anywhere."""
    (tmp_path / HISTORY_FILE).write_bytes(content)
    with pytest.raises(FedKSeedError, match=r"history\.json is damaged"):
        RunHistory(tmp_path)


def test_one_flipped_bit_in_the_file_is_refused_or_makes_no_difference(run, tmp_path):
    for nonce in (NONCE, OTHER):
        RunHistory(tmp_path).follow(task(run, 3, nonce=nonce))
    right, refusals = read_history(tmp_path / HISTORY_FILE), 0
    for where in synthetic.flips(tmp_path / HISTORY_FILE, 300):
        try:
            assert read_history(tmp_path / HISTORY_FILE) == right, where
        except FedKSeedError:
            refusals += 1
    assert refusals > 250


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    Path(tmp_path / HISTORY_FILE).mkdir()
    with pytest.raises(FedKSeedError, match="can't read"):
        RunHistory(tmp_path)
