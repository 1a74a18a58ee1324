"""The discrete Gaussian distribution, against its definition."""

import math
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, norm

from fedkseed import FedKSeedError
from fedkseed.secure import noise
from fedkseed.secure.noise import Bits, discrete_gaussian

KEY = bytes(range(32))


def probabilities(variance, values) -> np.ndarray:
    weight = {x: math.exp(-x * x / 2 / variance) for x in range(-200, 201)}
    total = sum(weight.values())
    return np.array([weight[x] / total for x in values])


@pytest.mark.parametrize(("variance", "close"), [(1, 0), (2, 0), (30, 0), (30, 2)])
def test_frequencies_are_those_of_the_definition(monkeypatch, variance, close):
    """With `close` = 2 every comparison is made with more digits."""
    monkeypatch.setattr(noise, "CLOSE", close or noise.CLOSE)
    count, reach = 2_000 if close else 100_000, int(2.5 * math.sqrt(variance))
    found = discrete_gaussian(variance, count, KEY)
    values = np.arange(-reach, reach + 1)
    seen = np.array([(found == x).sum() for x in values])
    expected = count * probabilities(variance, values.tolist())
    rest = count - expected.sum()
    assert chisquare([*seen, count - seen.sum()], [*expected, rest]).pvalue > 1e-3


@pytest.mark.parametrize("variance", [0, -1, noise.MOST + 1])
def test_a_variance_that_integers_do_not_hold_is_refused(variance):
    with pytest.raises(FedKSeedError, match="variance 1 to 2"):
        discrete_gaussian(variance, 3, KEY)


def test_the_largest_variance():
    found = discrete_gaussian(noise.MOST, 4000, KEY) / math.sqrt(noise.MOST)
    assert kstest(found, norm.cdf).pvalue > 1e-3


def test_with_a_large_variance_it_looks_like_the_continuous_one():
    found = discrete_gaussian(10**8, 4000, KEY) / 10**4
    assert kstest(found, norm.cdf).pvalue > 1e-3
    assert abs(found.std() - 1) < 5 / math.sqrt(2 * 4000)


def test_a_key_gives_its_own_samples_again():
    first, again, other = (discrete_gaussian(100, 50, key) for key in (KEY, KEY, bytes(32)))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("bound", [1, 2, 3, 255, 256, 257, 1000])
def test_numbers_below_a_bound_are_all_equally_likely(bound):
    seen = np.bincount(Bits(KEY).below(bound, 20 * max(bound, 100)), minlength=bound)
    assert seen.size == bound
    assert bound == 1 or chisquare(seen).pvalue > 1e-3


@pytest.mark.parametrize(("x", "u", "below"), [(Fraction(1, 3), 0, True), (Fraction(1, 3), (1 << 53) - 1, False)])
def test_a_comparison_with_more_digits_is_right_where_it_is_clear(x, u, below):
    assert Bits(KEY)._exactly(u, x) is below


def test_a_comparison_with_more_digits_goes_on_where_53_bits_are_equal():
    """Of numbers that begin with the first 53 bits of exp(−1), the share that the next bits of exp(−1) say is below."""
    first, rest = divmod(int(Decimal(2) ** 117 * Context(prec=60).exp(Decimal(-1))), 1 << 64)
    bits, count = Bits(KEY), 2000
    share = np.mean([bits._exactly(first, Fraction(1)) for _ in range(count)])
    assert abs(share - rest / 2**64) < 5 * 0.5 / math.sqrt(count)
