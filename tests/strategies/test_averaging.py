"""Averages of weights, small enough to check by hand."""

import numpy as np
import pytest
import torch

from fedkseed import FedKSeedError, Pool, Run, Upload
from fedkseed.directions.operations import accumulate_
from fedkseed.local.work import LocalWork
from fedkseed.randomness import draw_directions
from fedkseed.strategies.averaging import Averaging, AveragingState
from fedkseed.strategies.checks import NONE
from fedkseed.strategy import Settings, Strategy
from fedkseed.wire.records import Change

RUN = Run(Pool(1, 1 << 32, "gaussian"), bytes(32))
START = np.array([1.0, 2.0, 3.0], np.float32)


def strategy(uplink: str = "weights", **changes) -> Strategy[AveragingState]:
    local = LocalWork(**{"rounds": 10, "steps": 3, **changes})
    return Averaging.make(Settings(RUN, local, start=START, tensors=((0, 1), (4, 2))), uplink=uplink)


def change(client: int, values: list[float], examples: int = 1, **changes) -> Change:
    about = {"run": RUN, "round": 0, "client": client, "examples": examples, "loss": 1.0, "skipped": 0}
    return Change(**{**about, "values": np.array(values, np.float32), "counts": NONE, **changes})


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
