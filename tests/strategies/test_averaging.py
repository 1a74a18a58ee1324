"""Averages of weights, small enough to check by hand."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError, Pool, Run, Upload, encode, run_round
from fedkseed.directions.operations import accumulate_
from fedkseed.errors import DivergedError
from fedkseed.local.work import LocalWork
from fedkseed.randomness import draw_directions
from fedkseed.strategies.averaging import Averaging, AveragingState
from fedkseed.strategy import Settings, Strategy
from fedkseed.wire.records import Change

from ..wire.codec_calls import Alive

RUN = Run(Pool(1, 1 << 32, "gaussian"), bytes(32))
START = np.array([1.0, 2.0, 3.0], np.float32)


def strategy(uplink: str = "weights", **changes) -> Strategy[AveragingState]:
    local = LocalWork(**{"rounds": 10, "steps": 3, **changes})
    return Averaging.make(Settings(RUN, local, start=START, tensors=((0, 1), (4, 2))), uplink=uplink)


def change(client: int, values: list[float], examples: int = 1, **changes) -> Change:
    about = {"run": RUN, "round": 0, "client": client, "examples": examples, "loss": 1.0, "skipped": 0}
    return Change(**{**about, "values": np.array(values, np.float32), "counts": np.empty(0, np.uint32), **changes})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"steps_of": "sgdd"}, "no kind of local steps is called 'sgdd'; choose one of sgd, adam, one point"),
        ({"uplink": "scalar"}, "no uplink is called 'scalar'; choose one of weights, scalars"),
        ({"steps_of": "sgd", "uplink": "scalars"}, "no uplink is called 'scalars'; choose one of weights"),
    ],
)
def test_settings_that_do_not_exist_are_refused(changes, match):
    with pytest.raises(FedKSeedError, match=match):
        strategy(**changes)


def test_the_mean_is_weighted_by_examples():
    state = strategy().server.init()
    after = strategy().aggregate(state, [change(1, [0, 0, 4], 3), change(0, [4, 0, 0], 1)])
    np.testing.assert_array_equal(after.values, [1, 0, 3])
    assert after.round == 1
    np.testing.assert_array_equal(state.values, START)


def weights_of_all_sizes(rng: np.random.Generator, shape: tuple[int, ...], least: int) -> np.ndarray:
    """Float32 numbers of 2^least to 2^24, a tenth of them 0, and some near cancellation."""
    drawn = rng.choice([-1, 1], shape) * (1 + rng.random(shape)) * 2.0 ** rng.integers(least, 24, shape)
    return np.where(rng.random(shape) < 0.1, 0, drawn).astype(np.float32)


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_has_the_same_bits_in_any_order_and_is_the_exact_one_rounded(seed):
    rng = np.random.default_rng(seed)
    rows, examples = weights_of_all_sizes(rng, (int(rng.integers(1, 9)), 3), -140), rng.integers(1, 1000, 9).tolist()
    if len(rows) > 2:
        rows[1] = -rows[0]
    changes = [change(client, row.tolist(), examples[client]) for client, row in enumerate(rows)]
    server = strategy().server
    one = strategy().aggregate(server.init(), changes).values
    other = strategy().aggregate(server.init(), [changes[k] for k in rng.permutation(len(changes))]).values
    assert one.tobytes() == other.tobytes()
    total = sum(examples[: len(rows)])
    for k, mean in enumerate(one.tolist()):
        exact = sum(Fraction(float(row[k])) * n for row, n in zip(rows, examples, strict=False)) / total
        largest = Fraction(float(abs(rows[:, k]).max()))
        assert abs(Fraction(mean) - exact) <= Fraction(2.0**-52) + abs(exact) / 2**24 + largest / 2**50


@pytest.mark.parametrize("examples", [1, 7, 1000, 2**32 - 1])
@pytest.mark.parametrize("clients", [1, 3])
def test_the_mean_of_one_client_or_of_equal_ones_is_what_they_sent(examples, clients):
    for seed in range(20):
        values = weights_of_all_sizes(np.random.default_rng(seed), (3,), -28).tolist()
        after = strategy().aggregate(strategy().server.init(), [change(k, values, examples) for k in range(clients)])
        np.testing.assert_array_equal(after.values, np.float32(values))


def test_a_weight_that_no_sum_could_hold_is_refused_and_the_others_count():
    one = strategy()
    accumulator = one.aggregator.start(one.server.init(), {0: None, 1: None})
    one.aggregator.add_(accumulator, change(0, [1, 2, 3]))
    for far in (2.0**24 * 1.01, -3e38):
        with pytest.raises(
            DivergedError, match=r"client 1 has trained a weight to .*, at most 1.67772e\+07 is averaged"
        ):
            one.aggregator.add_(accumulator, change(1, [0, far, 0]))
    np.testing.assert_array_equal(one.aggregator.finish(accumulator).values, [1, 2, 3])


def test_a_claim_of_many_examples_counts_as_the_share_that_integers_hold():
    changes = [change(0, [3, 0, 0], 2**32 - 1), change(1, [0, 3, 0], 2**32 - 1)]
    after = strategy().aggregate(strategy().server.init(), changes)
    np.testing.assert_array_equal(after.values, [1.5, 1.5, 0])


@pytest.mark.parametrize("dense", [2, 18])
def test_a_round_holds_one_upload_however_many_clients_there_are(dense, monkeypatch):
    size, alive = 1 << 18, Alive(monkeypatch)
    settings = Settings(RUN, LocalWork(rounds=10, steps=3), start=np.zeros(size, np.float32), tensors=((0, size),))
    one, held = Averaging.make(settings), list[int]()

    def transport(messages):
        for client in messages:
            held.append(tracemalloc.get_traced_memory()[0])
            yield client, encode(Change(RUN, 0, client, 1, 1.0, 0, np.full(size, client, np.float32)))

    tracemalloc.start()
    after, _ = run_round(one, one.server.init(), range(dense), transport)
    tracemalloc.stop()
    np.testing.assert_array_equal(after.values, np.float32((dense - 1) / 2))
    assert alive.most == 1
    assert held[-1] - held[1] < size, "nothing is held of those that have come, whose uploads have 4 bytes a weight"


def test_what_does_not_fit_is_refused():
    state = strategy().server.init()
    for uploads, message in [
        ([], "got no upload"),
        ([change(0, [1, 2])], "sent 2 numbers, 3 were asked for"),
        ([change(0, [1, 2, 3]), change(0, [1, 2, 3])], "twice"),
        ([change(0, [1, 2, 3], round=1)], "answered round 1, the server is in round 0"),
    ]:
        with pytest.raises(FedKSeedError, match=message):
            strategy().aggregate(state, uploads)


def test_scalars_move_the_servers_weights_along_their_directions():
    scalars = strategy(uplink="scalars", lr=0.5, probes=2)
    one = Upload(RUN, 0, 0, 3, 1.0, np.array([1, 2, 3, np.nan, 5, 6], np.float32))
    two = Upload(RUN, 0, 1, 1, 1.0, np.array([np.nan] * 5 + [7], np.float32))
    after = scalars.aggregate(scalars.server.init(), [two, one])
    want = torch.from_numpy(START.copy())
    drawn = [draw_directions(1, 0, client, 6, 1 << 32, None) for client in (0, 1)]
    moved = zip([*drawn[0], drawn[1][5]], [0.75 * x for x in (1, 2, 3, 0, 5, 6)] + [0.25 * 7], strict=True)
    for direction, step in sorted(moved):
        accumulate_(want[:1], RUN.pool, [direction], [-0.25 * step], tensor=0)
        accumulate_(want[1:], RUN.pool, [direction], [-0.25 * step], tensor=4)
    np.testing.assert_allclose(after.values, want.numpy(), rtol=1e-6)
    too_many = Upload(RUN, 0, 0, 3, 1.0, np.ones(9, np.float32))
    with pytest.raises(FedKSeedError, match="9 scalars, 6 were asked for"):
        scalars.aggregate(scalars.server.init(), [too_many])


def test_one_epoch_is_all_examples_once():
    assert LocalWork(1, steps=200, batch_size=2).count(7) == 200
    assert LocalWork(1, epochs=1, batch_size=2).count(7) == 4
    assert LocalWork(1, epochs=3, batch_size=2).count(7) == 12
    assert LocalWork(1, epochs=1, batch_size=8).count(3) == 1
