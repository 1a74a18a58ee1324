"""Copies of a set: in any order, over any partition, with kills in between, they end as one."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.network.peers import FILE
from fedkseed.network.peers.merge_rule import model_of
from fedkseed.network.peers.store import UploadStore
from fedkseed.network.protocol.signatures import sign
from fedkseed.run.store import pack

from .synthetic import PEERS, RECIPE, ROUNDS, Federation, secret


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.of()


@pytest.fixture(scope="module")
def everything(federation) -> list[bytes]:
    return federation.everything()


@pytest.fixture(scope="module")
def whole(federation, everything, tmp_path_factory) -> tuple[bytes, bytes]:
    """Digest and model of the whole set, by the definition."""
    with closing(UploadStore(tmp_path_factory.mktemp("whole") / FILE, federation.rule)) as store:
        store.add(everything, ROUNDS)
        return store.digest(), pack(model_of(federation.rule, everything))


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_copies_that_were_given_parts_in_any_order_are_one_when_they_have_met(
    federation, everything, whole, tmp_path_factory, data
):
    """Models are asked for in between, as peers do when a round opens; late entries then change earlier rounds."""
    folder, rule = tmp_path_factory.mktemp("stores"), federation.rule
    sides = data.draw(st.lists(st.integers(0, 2), min_size=len(everything), max_size=len(everything)))
    order = data.draw(st.permutations(range(len(everything))))
    stores = [UploadStore(folder / f"{k}.sqlite", rule) for k in range(3)]
    for place, k in enumerate(order):
        stores[sides[k]].add([everything[k]], ROUNDS)
        if place % 9 == 0:
            stores[sides[k]].state(place % (ROUNDS + 1))
    for k in data.draw(st.permutations(range(3))):  # each takes what the others have, one of them with repetitions
        for other in stores:
            names = [name for round_ in range(ROUNDS) for name in other.names(round_)]
            stores[k].add(other.data(names) * (1 + k), ROUNDS)
    for store in stores:  # who went first has not seen what the others learnt since
        for other in stores:
            store.add(other.data([name for round_ in range(ROUNDS) for name in other.names(round_)]), ROUNDS)
    for store in stores:
        assert (store.digest(), pack(store.state(ROUNDS))) == whole
        assert store.contradictions() == [(2, 1), (4, 0)]
        assert len(store.counting()) == PEERS * ROUNDS - 2
        store.close()
        with closing(UploadStore(store.path, rule)) as again:  # as after a kill
            assert (again.digest(), pack(again.state(ROUNDS))) == whole


def test_a_state_in_the_middle_is_that_of_the_entries_before_it(federation, tmp_path):
    with closing(UploadStore(tmp_path / FILE, federation.rule)) as store:
        store.add([federation.entry(client, 0).encoded for client in range(PEERS)], ROUNDS)
        first = pack(store.state(1))
        store.add([federation.entry(client, 1).encoded for client in range(PEERS)], ROUNDS)
        assert pack(store.state(1)) == first
        second = pack(store.state(2))
        store.add([federation.entry(0, 2).encoded], ROUNDS)
        assert (pack(store.state(2)), pack(store.state(1))) == (second, first)
        store.add([federation.entry(1, 0, draw=1).encoded], ROUNDS)  # peer 1 contradicts itself: it did not count
        assert pack(store.state(1)) != first
        data = store.data([name for k in range(ROUNDS) for name in store.names(k)])
        assert pack(store.state(ROUNDS)) == pack(model_of(federation.rule, data))


def test_many_rounds_need_only_a_few_states(tmp_path):
    federation = Federation.of(RECIPE.replace("rounds = 4", "rounds = 60"))
    with closing(UploadStore(tmp_path / FILE, federation.rule)) as store:
        store.add([federation.entry(0, round_).encoded for round_ in range(60)], 60)
        last = pack(store.state(60))
        assert len(store._states) < 14
        assert store.state(3).round == 3
        store.add([federation.entry(1, 20).encoded], 60)
        assert pack(store.state(60)) != last
        names = [name for k in range(60) for name in store.names(k)]
        assert pack(store.state(60)) == pack(model_of(federation.rule, store.data(names)))


def test_what_is_refused_leaves_what_came_with_it(federation, tmp_path):
    with closing(UploadStore(tmp_path / FILE, federation.rule)) as store:
        good, bad = federation.entry(0, 0).encoded, federation.entry(1, 0, signer=2).encoded
        added, refused = store.add([bad, good, good, b"junk"], ROUNDS)
        assert [header.client for header in added] == [0]
        assert len(refused) == 2
        assert store.add([good], ROUNDS) == ([], [])


def test_a_disk_that_fails_leaves_the_copy_as_it_was(federation, tmp_path):
    with closing(UploadStore(tmp_path / FILE, federation.rule)) as store:
        store.add([federation.entry(0, 0).encoded], ROUNDS)
        before = store.digest()
        with closing(sqlite3.connect(tmp_path / FILE)) as other:
            other.execute("BEGIN IMMEDIATE")
            store._database.execute("PRAGMA busy_timeout = 1")
            with pytest.raises(FedKSeedError, match="database is locked"):
                store.add([federation.entry(1, 0).encoded, federation.entry(0, 0, draw=1).encoded], ROUNDS)
        assert store.digest() == before
        assert store.contradictions() == []
        assert len(store.add([federation.entry(1, 0).encoded], ROUNDS)[0]) == 1


def test_a_copy_of_another_run_is_refused(federation, tmp_path):
    UploadStore(tmp_path / FILE, federation.rule).close()
    with pytest.raises(FedKSeedError, match=r"is of the run .*: undo the change, or choose another --state"):
        UploadStore(tmp_path / FILE, Federation.of(seconds=5.0).rule)


def test_a_file_that_is_no_database_is_refused(federation, tmp_path):
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(FedKSeedError, match=r"can't open .*file is not a database"):
        UploadStore(tmp_path / FILE, federation.rule)


def test_uploads_that_were_trained_from_the_models_of_this_set_are_counted(federation, tmp_path):
    with closing(UploadStore(tmp_path / FILE, federation.rule)) as store:
        for round_ in range(2):
            made = replace(federation.entry(0, round_), base=store.rule.broadcast_digest(store.state(round_)))
            made = replace(made, signature=sign(secret(0), made.statement(store.rule.run)))
            store.add([made.encoded, federation.entry(1, round_).encoded], ROUNDS)
        assert store.count_trained_from_here() == 2
        store.add([federation.entry(2, 0).encoded], ROUNDS)  # came late: round 2 was trained without it
        assert store.count_trained_from_here() == 1
