"""The discrete Gaussian distribution, against its definition."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, norm

from fedkseed.secure.noise import Bits, discrete_gaussian

KEY = bytes(range(32))


def probabilities(variance: float, values) -> np.ndarray:
    weight = {x: math.exp(-x * x / 2 / variance) for x in range(-200, 201)}
    total = sum(weight.values())
    return np.array([weight[x] / total for x in values])


@pytest.mark.parametrize("variance", [1, 2, 30])
def test_frequencies_are_those_of_the_definition(variance):
    count, reach = 20_000, int(2.5 * math.sqrt(variance))
    found = discrete_gaussian(variance, count, KEY)
    values = np.arange(-reach, reach + 1)
    seen = np.array([(found == x).sum() for x in values])
    expected = count * probabilities(variance, values.tolist())
    rest = count - expected.sum()
    assert chisquare([*seen, count - seen.sum()], [*expected, rest]).pvalue > 1e-3


def test_with_a_large_variance_it_looks_like_the_continuous_one():
    found = discrete_gaussian(10**8, 4000, KEY) / 10**4
    assert kstest(found, norm.cdf).pvalue > 1e-3
    assert abs(found.std() - 1) < 5 / math.sqrt(2 * 4000)


def test_a_key_gives_its_own_samples_again():
    first, again, other = (discrete_gaussian(100, 50, key) for key in (KEY, KEY, bytes(32)))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(discrete_gaussian(100, 20, KEY), first[:20])


@pytest.mark.parametrize("bound", [1, 2, 3, 255, 256, 257, 1000])
def test_numbers_below_a_bound_are_all_equally_likely(bound):
    bits, count = Bits(KEY), 20 * max(bound, 100)
    seen = np.bincount([bits.below(bound) for _ in range(count)], minlength=bound)
    assert seen.size == bound
    assert bound == 1 or chisquare(seen).pvalue > 1e-3


def test_numbers_beyond_64_bits():
    bits = Bits(KEY)
    found = [bits.below(3**60) for _ in range(200)]
    assert max(found) < 3**60
    assert max(found) > 3**60 * 0.9
