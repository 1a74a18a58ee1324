"""What the server keeps of every round, small enough to check by hand."""

from dataclasses import replace

import numpy as np
import pytest

from fedkseed import FedKSeedError, Pool, Run, Upload
from fedkseed.local.work import LocalWork
from fedkseed.randomness import draw_directions
from fedkseed.strategies.checks import NONE
from fedkseed.strategies.replay import Replay
from fedkseed.weights.full import Free
from fedkseed.weights.layout import Layout
from fedkseed.wire.records import Change, History

from ..conftest import tiny_llama

RUN = Run(Pool(1, 1 << 32, "rademacher"), bytes(32))


def strategy(kind: str, **changes) -> Replay:
    steps_of = "sgd" if kind in ("projected", "by tensor") else "two points"
    server_lr = changes.pop("server_lr", 1.0)
    local = LocalWork(**{"rounds": 10, "steps_of": steps_of, "steps": 2, "lr": 0.5, **changes})
    return Replay(RUN, Pool(1, 4, "hadamard"), 2, local, kind, server_lr)


def change(client: int, values: list[float], counts: list[int] | None = None, examples: int = 1, round_: int = 0):
    numbers = np.array(values, np.float32)
    return Change(
        RUN, round_, client, examples, 1.0, 0, numbers, NONE if counts is None else np.array(counts, np.uint32)
    )


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(FedKSeedError, match="no kind is called 'draw'; choose one of drawn, shared"):
        strategy("draw")
    with pytest.raises(FedKSeedError, match="no kind is called 'shared'; choose one of projected, by tensor"):
        strategy("shared", steps_of="sgd")


def upload(client: int, found: list[float], examples: int = 1, round_: int = 0, run: Run = RUN) -> Upload:
    return Upload(run, round_, client, examples, 1.0, np.array(found, np.float32))


def test_drawn_scalars_are_kept_with_their_directions_merged_and_ascending():
    few = Run(Pool(3, 2, "rademacher"), bytes(32))
    replay = replace(strategy("drawn", steps=3), run=few)
    one, two = upload(4, [4.0, np.nan, 1.0], 1, run=few), upload(1, [1.0, 2.0, 3.0], 3, run=few)
    (a, _, c), (i, j, k) = (draw_directions(3, 0, client, 3, 2, None) for client in (4, 1))
    sums = np.zeros(2)
    np.add.at(sums, [a, c, i, j, k], [0.25 * 4, 0.25 * 1, 0.75 * 1, 0.75 * 2, 0.75 * 3])
    assert {a, c, i, j, k} == {0, 1}  # so that some are added up
    state = replay.aggregate(replay.init(), [one, two])
    np.testing.assert_array_equal(state.directions, [0, 1])
    np.testing.assert_allclose(state.coefficients, -0.5 * sums)
    np.testing.assert_array_equal(state.counts, [[2]])
    np.testing.assert_array_equal(state.clients, [1, 4])
    np.testing.assert_array_equal(state.seen, [0, 0])


def test_shared_scalars_are_averaged_and_need_no_directions():
    replay = strategy("shared", probes=2)
    state = replay.aggregate(replay.init(), [change(0, [4, 0, 0, 8], examples=3), change(1, [0, 4, 0, 8])])
    np.testing.assert_allclose(state.coefficients, [-0.25 * v for v in (3, 1, 0, 8)])
    assert state.directions.size == 0
    np.testing.assert_array_equal(replay.implied(2, slice(0, 4)), [8, 9, 10, 11])


def test_a_projection_is_averaged_and_scaled():
    replay = strategy("projected", server_lr=2.0)
    state = replay.aggregate(replay.init(), [change(0, [4, 0, 0, 8], examples=3), change(1, [0, 4, 0, 8])])
    np.testing.assert_allclose(state.coefficients, [6, 2, 0, 16])
    pools = [replay.round_pool(round_) for round_ in (0, 0, 1)]
    assert pools[0] == pools[1] != pools[2]


def test_tensors_that_clients_gave_different_counts_are_averaged_as_if_zeros_filled_them():
    replay = strategy("by tensor")
    one, two = change(0, [1, 2, 3, 4], [3, 1]), change(1, [10, 20, 30], [1, 2])
    state = replay.aggregate(replay.init(), [one, two])
    np.testing.assert_array_equal(state.counts, [[3, 2]])
    np.testing.assert_allclose(state.coefficients, [5.5, 1, 1.5, 12, 15])


@pytest.mark.parametrize("kind", ["drawn", "shared", "projected", "by tensor"])
def test_a_client_is_sent_the_rounds_since_it_last_took_part(kind):
    replay = strategy(kind)
    state = replay.init()
    for round_, cohort in enumerate([(1, 2), (2,), (2, 3)]):
        if kind == "drawn":
            found = [1.0, 2.0] if len(cohort) == 1 else [1.0, np.nan]  # two of each round
            uploads = [upload(client, found, round_=round_) for client in cohort]
        else:
            values = {"shared": [1, 2], "projected": [1, 2, 3, 4], "by tensor": [1, 2, 3]}[kind]
            counts = [1, 2] if kind == "by tensor" else None
            uploads = [change(client, values, counts, round_=round_) for client in cohort]
        state = replay.aggregate(state, uploads)
    sent = replay.broadcast(state, [1, 2, 3, 9])
    assert {client: message.since for client, message in sent.items()} == {1: 0, 2: 2, 3: 2, 9: 0}
    assert sent[2] is sent[3]
    size = state.coefficients.size // 3
    assert [sent[client].coefficients.size for client in (1, 2, 9)] == [3 * size, size, 3 * size]


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("projected", {"counts": np.array([[1, 1], [1, 1]], np.uint32)}, "has 1 counts a round.*got 2 counts"),
        ("by tensor", {}, "has 2 counts a round.*got 1 counts"),
        ("projected", {"directions": np.arange(4, dtype=np.uint32)}, "got 1 counts and 4 directions"),
        ("drawn", {}, "0 directions and 2 coefficients"),
        ("projected", {"counts": np.array([[1], [5]], np.uint32)}, "directions must lie in 0 to 3, got 0 to 4"),
    ],
)
def test_a_history_that_does_not_fit_is_refused_and_changes_nothing(kind, changes, match):
    weights = Free(Layout(tiny_llama()), RUN.pool)
    before = weights.digest()
    history = {"counts": np.array([[2], [2]], np.uint32), "directions": NONE, **changes}
    total = int(history["counts"].sum())
    message = History(RUN, 2, 1.0, 0, coefficients=np.ones(total, np.float32), **history)
    with pytest.raises(FedKSeedError, match=match):
        strategy(kind).sync(message, weights)
    assert weights.digest() == before
    assert weights.version == 0


def test_scalars_that_overflow_are_refused():
    with pytest.raises(FedKSeedError, match="round 0 would overflow float32"):
        strategy("drawn", lr=1e34).aggregate(strategy("drawn").init(), [upload(5, [1e6, 1e6])])


def test_what_does_not_fit_is_refused():
    for replay, sent, message in [
        (strategy("drawn"), upload(5, [1.0]), "client 5 reports 1 scalars, 2 were asked for"),
        (strategy("shared"), change(5, [1]), "client 5 sent 1 numbers for 1 tensors, 2 numbers were asked for"),
        (strategy("projected"), change(5, [1]), "4 numbers were asked for"),
        (strategy("by tensor"), change(5, [1, 2]), "up to 4 numbers for each of 2 tensors"),
        (strategy("by tensor"), change(5, [1] * 6, [5, 1]), "up to 4 numbers for each of 2 tensors"),
        (strategy("shared", clip=3.0), change(5, [1, -4]), "client 5 reports a scalar gradient of 4, at most 3"),
        (strategy("projected", server_lr=1e3), change(5, [1, 2, 3, 3e38]), "round 0 would overflow float32"),
        (strategy("shared", lr=1e3), change(5, [1, 3e38]), "round 0 would overflow float32"),
    ]:
        with pytest.raises(FedKSeedError, match=message):
            replay.aggregate(replay.init(), [sent])
