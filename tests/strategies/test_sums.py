"""Sums of integers: every order, grouping and sharding of a round gives one sum."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.strategies.sums import HEAVIEST, MOST, Contribution, Sum
from fedkseed.wire.numbers import GRID, LARGEST, WIRES, scalar
from tests.strategies import vectors

SIZE = 32


@st.composite
def rounds(draw) -> list[Contribution]:
    """The contributions of some clients: scalars in any wire, or changes of all coefficients."""
    rng, made = np.random.default_rng(draw(st.integers(0, 2**32))), []
    for client in range(draw(st.integers(1, 12))):
        weight = draw(st.integers(1, HEAVIEST // 12))
        if draw(st.booleans()):
            unit = 1e-3 * GRID
            most = 0.999 * MOST * unit  # a larger change is refused, as another test asks
            change = (rng.normal(size=SIZE) * 10.0 ** draw(st.integers(-9, 3))).clip(-most, most).astype(np.float32)
            made.append(Contribution.of_change(client, weight, change, unit))
            continue
        wire, scale = draw(st.sampled_from(WIRES)), 10.0 ** draw(st.integers(-6, 6))
        found = [scalar(x, math.inf, wire) for x in rng.normal(size=3) * scale]
        scalars = np.array([x for x in found if not math.isnan(x)], np.float32)
        made.append(Contribution.of_scalars(client, weight, rng.integers(0, SIZE, scalars.size), scalars))
    return made


@given(rounds(), st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=200)
def test_any_order_grouping_and_shard_gives_the_same_bits(made, random, shards):
    whole = Sum.of(made, SIZE)
    shuffled = random.sample(made, len(made))
    groups = [shuffled[k::shards] for k in range(shards)]
    total = Sum.of([], SIZE)
    for group in random.sample(groups, shards):
        total = total + Sum.of(group, SIZE)
    assert total.values.tobytes() == whole.values.tobytes()
    assert total.weight == whole.weight
    assert total.mean(1e-7).tobytes() == whole.mean(1e-7).tobytes()
    masks = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (len(made), SIZE))
    dense = [Sum.of([replace(one, weight=1)], SIZE).values for one in made]
    masked = sum(m + one.weight * values for m, one, values in zip(masks, made, dense, strict=True))
    assert (masked - masks.sum(0)).tobytes() == whole.values.tobytes()  # modulo 2^64, as secure aggregation adds
    exact = [sum(one.weight * int(values[j]) for one, values in zip(made, dense, strict=True)) for j in range(SIZE)]
    assert whole.values.tolist() == exact


def test_a_scalar_that_travels_is_a_whole_number_of_the_grid():
    for wire in WIRES:
        for found in (0.3, -LARGEST, 1e-5, 7.123456, 1e9):
            sent = np.array([scalar(found, math.inf, wire)], np.float32)
            if not math.isnan(sent[0]):
                one = Contribution.of_scalars(0, 1, np.array([5], np.uint32), sent)
                assert one.values[0] * GRID == sent[0]


def test_no_sum_that_is_let_through_overflows():
    heavy = Contribution.of_change(0, HEAVIEST, np.full(1, -MOST * GRID, np.float32), GRID)
    assert Sum.of([heavy], 1).values[0] == MOST * HEAVIEST < 2**62


def test_numbers_beyond_the_bounds_are_refused():
    with pytest.raises(FedKSeedError, match=r"client 3 reports a gradient beyond 4\.1943e"):
        Contribution.of_change(3, 1, np.full(1, 2e38, np.float32), GRID)
    with pytest.raises(FedKSeedError, match="client 3 reports a gradient beyond"):
        Contribution.of_scalars(3, 1, np.zeros(5, np.uint32), np.full(5, LARGEST, np.float32))


def test_published_rounds_give_the_published_states():
    """docs/aggregation.md: the next state, to the bit, of uploads in any order."""
    for case in json.loads(vectors.PATH.read_text())["rounds"]:
        for order in (1, -1):
            assert vectors.next_state(case, order) == case["after"], case["name"]


def test_the_vectors_are_those_that_the_command_writes():
    assert json.loads(vectors.PATH.read_text()) == json.loads(json.dumps(vectors.vectors()))


def test_clients_that_weigh_nothing_move_nothing():
    """Agreement can leave out all of a round, or the one that is tried alone."""
    none = Sum.of([Contribution.of_change(3, 0, np.ones(4, np.float32), GRID)], 4)
    assert none.mean(1.0).tolist() == [0.0] * 4
