"""Rules that a hostile few can't sway: against the library byzfl, and by what each is for."""

import importlib.util
import sys
import tracemalloc
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedkseed import Pool, Run
from fedkseed.local.work import LocalWork
from fedkseed.strategies.kseed import KSeed
from fedkseed.strategies.robust import RULES, cut, memory_of, norm, sum_of
from fedkseed.strategies.sums import Contribution
from fedkseed.strategy import Settings, Trust
from fedkseed.wire.numbers import GRID, scalars
from fedkseed.wire.records import Change, Upload

SIZE = 64


@cache
def byzfl() -> Any:
    """The aggregators of byzfl, without its benchmarks, which need torchvision."""
    found = importlib.util.find_spec("byzfl")
    if found is None or found.origin is None:
        pytest.skip("byzfl is not installed: pip install --no-deps byzfl==0.0.11")
    package = ModuleType("byzfl")
    package.__path__ = [str(Path(found.origin).parent)]
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators")


def made(rows: NDArray[np.float64], weights: list[int] | None = None) -> list[Contribution]:
    """Contributions that say `rows`, in units of GRID."""
    weights = weights or [1] * len(rows)
    return [
        Contribution.of_change(client, weight, (-row).astype(np.float32), 1.0)
        for client, (row, weight) in enumerate(zip(rows, weights, strict=True))
    ]


def rows(honest: int = 8, hostile: int = 2, seed: int = 0) -> NDArray[np.float64]:
    """Whole numbers: honest clients around one gradient, and hostile ones far away."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=SIZE) * 3e4
    good = truth + rng.normal(size=(honest, SIZE)) * 1e4
    return np.rint(np.vstack([good, -10 * truth + rng.normal(size=(hostile, SIZE)) * 1e5]))


@pytest.mark.parametrize("rule", ["mean", "trimmed", "median", "nnm-trimmed"])
@pytest.mark.parametrize("seed", range(5))
def test_a_rule_is_the_one_of_byzfl(rule, seed):
    of, x = byzfl(), rows(seed=seed)
    expected = {
        "mean": lambda: of.Average()(x),
        "trimmed": lambda: of.TrMean(2)(x),
        "median": lambda: of.Median()(x),
        "nnm-trimmed": lambda: of.TrMean(2)(of.NNM(2)(x)),
    }[rule]()
    np.testing.assert_allclose(sum_of(rule, made(x), SIZE, 0.2).mean(1.0), expected, atol=1e-6, rtol=1e-9)


def test_centered_clipping_is_the_one_of_byzfl_with_the_median_distance_as_its_bound():
    of, x = byzfl(), rows()
    center = np.zeros(SIZE)
    for _ in range(3):
        bound = float(np.median(np.linalg.norm(x - center, axis=1)))
        theirs = of.CenteredClipping(L=1, tau=bound)
        theirs.m = center  # its constructor refuses every array
        center = theirs(x)
    np.testing.assert_allclose(sum_of("centered clipping", made(x), SIZE, 0.2).mean(1.0), center, atol=2)


def test_norms_are_cut_to_their_median_and_weights_to_twice_theirs():
    x = rows()
    after = cut(made(x, [5, 1, 3, 4, 2, 3, 3, 3, 2**31, 3]))
    limit = np.median([np.linalg.norm(row) for row in x])
    for one, row in zip(after, x, strict=True):
        assert norm(one.values) <= limit + 8
        factor = min(1.0, limit / np.linalg.norm(row))
        np.testing.assert_allclose(one.values, row * factor, atol=0.51)
    assert [one.weight for one in after] == [5, 1, 3, 4, 2, 3, 3, 3, 6, 3]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
@pytest.mark.parametrize("lie", [1e3, -1e3, 1e9, "nothing"])
def test_two_of_ten_cannot_turn_the_sum_around(rule, lie):
    x = rows()
    x[8:] = 0 if lie == "nothing" else np.sign(lie) * min(abs(lie) * 3e4, 2.0**37) * np.sign(x[0])
    clean = x[:8].mean(0)
    found = sum_of(rule, cut(made(x, [1] * 8 + [2**20] * 2)), SIZE, 0.2).mean(1.0)
    assert found @ clean / clean @ clean > 0.25
    free = sum_of("mean", made(x, [1] * 8 + [2**20] * 2), SIZE, 0.2).mean(1.0)
    assert not 0.25 < free @ clean / clean @ clean < 4  # as it was without a rule


def test_a_client_that_says_nothing_does_not_make_the_step_of_the_others_smaller():
    x = rows(4, 0)
    silent = np.vstack([x, np.zeros((1, SIZE))])
    assert sum_of("clipped", cut(made(silent)), SIZE, 0.2).mean(1.0).tolist() == (
        sum_of("clipped", cut(made(x)), SIZE, 0.2).mean(1.0).tolist()
    )


@pytest.mark.parametrize("rule", RULES)
def test_one_client_alone_is_believed_and_nobody_is_divided_by_zero(rule):
    x = rows(1, 0)
    np.testing.assert_array_equal(sum_of(rule, cut(made(x)), SIZE, 0.2).mean(1.0), x[0])
    assert not sum_of(rule, cut(made(np.zeros((3, SIZE)))), SIZE, 0.2).values.any()
    nobody = sum_of(rule, [], SIZE, 0.2)  # whose evidence is not against it
    assert (nobody.weight, nobody.values.any()) == (0, False)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gives_the_same_bits_whatever_the_order_of_coefficients_and_however_far_numbers_are_apart(rule):
    """Float sums depend on the order; those in distances and norms must not."""
    rng = np.random.default_rng(1)
    x = np.rint(rng.normal(size=(9, SIZE)) * 10.0 ** rng.integers(0, 9, (9, 1)))
    turned = rng.permutation(SIZE)
    straight = sum_of(rule, cut(made(x)), SIZE, 0.2)
    other = sum_of(rule, cut(made(x[:, turned])), SIZE, 0.2)
    assert straight.values[turned].tobytes() == other.values.tobytes()
    assert straight.weight == other.weight


def test_medians_leave_nothing_of_scalars_along_directions_of_ones_own():
    """The reason why the default over a network is none of them; see docs/security.md."""
    rng = np.random.default_rng(0)
    uploads = [
        Contribution.of_scalars(c, 1, rng.integers(0, 4096, 200), np.rint(rng.normal(size=200) * 9).astype(np.float32))
        for c in range(10)
    ]
    assert not sum_of("median", uploads, 4096, 0.2).values.any()
    assert np.count_nonzero(sum_of("clipped", cut(uploads), 4096, 0.2).values) > 1000
    assert uploads[0].values.max() * GRID > 9


@pytest.mark.parametrize("agreement", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sends", ["changes", "scalars"])
def test_the_memory_that_a_rule_is_said_to_need_is_what_it_takes(rule, agreement, sends):
    size, clients, steps, rng = 512, 40, 100, np.random.default_rng(1)
    run, derivatives = Run(Pool(1, size, "hadamard"), bytes(32)), LocalWork(10, "sgd", lr=1e-3)
    local, trust = LocalWork(10, steps=steps, lr=1e-3), Trust(rule, 0.2, agreement)
    server = KSeed(Settings(run, local, derivatives, trust=trust, wire="exact"))
    accumulator = server.start(server.init(), range(clients))
    tracemalloc.start()
    for client in range(clients):
        if sends == "changes":
            change = (rng.normal(size=size) * 1e-4).astype(np.float32)
            server.add_(accumulator, Change(run, 0, client, 1, 1.0, 0, change, wire="exact"))
        else:
            server.add_(accumulator, Upload(run, 0, client, 1, 1.0, scalars(rng.normal(size=steps))))
    server.finish(accumulator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    numbers = size if sends == "changes" else steps
    said = memory_of(rule, agreement, clients, numbers, size, sends == "scalars")
    overhead = 120_000 + clients * 2_000  # bytes, of objects and of the state
    assert peak - overhead < 1.1 * said if said else peak < overhead
    assert peak > 0.9 * said
