"""Changes on the grid: what is sent has the right mean, and sums of whole numbers are turned back exactly."""

import math

import numpy as np
import pytest
from scipy.linalg import hadamard

from fedkseed import FedKSeedError
from fedkseed.directions.reference import transform
from fedkseed.secure.grid import Grid

RNG = np.random.default_rng


def test_the_transform_is_that_of_walsh_and_hadamard():
    x = RNG(0).integers(-9, 9, 64)
    assert np.array_equal(transform(x), hadamard(64) @ x)
    assert np.array_equal(transform(transform(x)), 64 * x)


@pytest.mark.parametrize("size", [1, 5, 64, 200])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rounding_has_the_right_mean_and_the_stated_error(size, bits):
    grid, change = Grid(2.0, bits, size, 7), RNG(1).normal(size=size)
    change *= 1.5 / np.linalg.norm(change)
    found = [grid.change(grid.coded(change, 3, k), 3) for k in range(400)]
    error = grid.step / 2 * math.sqrt(grid.padded)  # of one: each number is off by at most a step, half a step RMS
    assert np.linalg.norm(np.mean(found, 0) - change) < 3 * error / math.sqrt(400)
    assert all(np.linalg.norm(one - change) < 2 * error for one in found)


@pytest.mark.parametrize("clients", [3, 10, 1000])
def test_the_width_holds_the_sum_of_all_and_no_bit_more(clients):
    grid = Grid(1.0, 8, 64, 7)
    most = clients * grid.most
    assert 2 * most < 1 << grid.width(clients) <= 4 * most
    assert grid.width(10) == 12


def test_a_long_change_is_cut_to_the_norm():
    grid, change = Grid(1.0, 16, 256, 7), RNG(2).normal(size=256) * 50
    found = grid.change(grid.coded(change, 0, 0), 0)
    assert np.linalg.norm(found) == pytest.approx(1, rel=1e-3)
    assert found @ change / np.linalg.norm(change) == pytest.approx(1, rel=1e-3)


def test_one_large_number_is_spread_over_all():
    """Without the transform, a change of one coefficient would need the whole range in one number."""
    grid, change = Grid(1.0, 8, 4096, 7), np.zeros(4096)
    change[17] = 1.0
    codes = grid.coded(change, 0, 0)
    assert np.abs(codes).max() <= math.ceil(grid.most / 4) + 1
    assert np.linalg.norm(grid.change(codes, 0) - change) < 0.03


def test_a_sum_is_the_sum_of_what_was_sent():
    grid = Grid(1.0, 8, 100, 7)
    codes = [grid.coded(RNG(k).normal(size=100) / 20, 5, k) for k in range(9)]
    together = grid.change(np.sum(codes, 0), 5)
    assert np.allclose(together, np.sum([grid.change(one, 5) for one in codes], 0), atol=1e-12)
    assert not np.allclose(together, grid.change(np.sum(codes, 0), 6)), "each round has signs of its own"


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(FedKSeedError, match="not finite"):
        Grid(1.0, 8, 4, 7).coded(np.array([1, math.inf, 0, 0]), 0, 0)


@pytest.mark.parametrize("clients", [3, 9, 10, 100, 146])  # 9 and 146: nearly all of the 2^width values are sums
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_mask_that_is_left_on_a_sum_is_seen_and_the_longest_sum_is_not_refused(bits, clients):
    grid, rng = Grid(1.0, bits, 64, 7), RNG(3)
    half = 1 << grid.width(clients) - 1
    for _ in range(20):
        with pytest.raises(FedKSeedError, match="a wrong share"):
            grid.require_plausible(rng.integers(-half, half, 64), clients)
    change = rng.normal(size=64)
    grid.require_plausible(sum(grid.coded(change, 0, client) for client in range(clients)), clients)
