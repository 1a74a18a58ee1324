"""Exact samples of the discrete Gaussian distribution from random bits.

    P(x) ∝ exp(−x² / 2σ²) for whole x

A candidate is kept if a random number u in [0, 1) is below a probability p. Both are compared as floating-point
numbers, and where these are so close that rounding could decide, with more bits of u and as many digits of p as it
takes. So no sample depends on rounding, and its lowest bits say nothing of what it was added to.

Source: Canonne, Kamath and Steinke, 2020, Algorithms 2 and 3, https://arxiv.org/abs/2004.00010
"""

from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from math import isqrt

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from ..errors import FedKSeedError

CLOSE = 2.0**-44  # rounding moves p by less than 2^-50
MOST = 1 << 56  # σ², so that samples of up to 50 σ, times σ, fit in int64


class Bits:
    """Random numbers from ChaCha20's stream under a key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8")

    def below(self, bound: int, count: int) -> NDArray[np.int64]:
        """Uniform whole numbers of 0 to bound − 1; those at or above the bound are drawn again."""
        numbers = np.empty(0, np.int64)
        while numbers.size < count:
            drawn = self.words(count - numbers.size) & np.uint64((1 << bound.bit_length()) - 1)
            numbers = np.append(numbers, drawn[drawn < bound].astype(np.int64))
        return numbers

    def happens(self, x: NDArray[np.float64], exact: Callable[[int], Fraction]) -> NDArray[np.bool_]:
        """Events of probability exp(−x).

        Args:
            exact: the number x that stands at a place.
        """
        drawn, p = self.words(x.size) >> np.uint64(11), np.exp(-x)
        u = drawn * 2.0**-53
        events = u < p
        for k in np.flatnonzero(np.abs(u - p) < CLOSE).tolist():
            events[k] = self._exactly(int(drawn[k]), exact(k))
        return events

    def _exactly(self, u: int, x: Fraction) -> bool:
        """Whether a number that begins with the 53 bits u is below exp(−x)."""
        bits = 53
        while True:
            u, bits = u << 64 | int(self.words(1)[0]), bits + 64
            context = Context(prec=bits)  # digits: three times as many as the bits need
            p = context.exp(-context.divide(Decimal(x.numerator), Decimal(x.denominator)))
            slack, width = context.power(Decimal(10), 5 - bits), context.power(Decimal(2), -bits)
            low = context.multiply(Decimal(u), width)
            if low + width + slack < p:
                return True
            if low - slack > p:
                return False


def discrete_gaussian(variance: int, count: int, key: bytes) -> NDArray[np.int64]:
    """Independent samples with σ² = `variance`, 1 to MOST, shape (count,); the same key gives the same ones.

    Of a discrete Laplace distribution of scale t = ⌊σ⌋ + 1, kept with probability exp(−(|y| − σ² / t)² / 2σ²).
    """
    if not 1 <= variance <= MOST:
        raise FedKSeedError(f"noise has variance 1 to 2^56 grid steps, got {variance}: use fewer bits or more noise")
    bits, t = Bits(key), isqrt(variance) + 1
    samples = np.empty(0, np.int64)
    while samples.size < count:
        y = _laplace(t, 2 * (count - samples.size) + 16, bits)  # 1.3 candidates a sample
        apart = np.abs(y) * t - variance
        kept = bits.happens(
            (apart / t) ** 2 / (2.0 * variance), lambda k, a=apart: Fraction(int(a[k]) ** 2, 2 * variance * t * t)
        )
        samples = np.append(samples, y[kept])
    return samples[:count]


def _laplace(t: int, count: int, bits: Bits) -> NDArray[np.int64]:
    """Samples of P(x) ∝ exp(−|x| / t), up to `count`: those of candidates that were kept."""
    u = bits.below(t, count)
    u = u[bits.happens(u / t, lambda k: Fraction(int(u[k]), t))]
    v, more = np.zeros(u.size, np.int64), np.arange(u.size)
    while more.size:
        more = more[bits.happens(np.ones(more.size), lambda k: Fraction(1))]
        v[more] += 1
    x, negative = u + t * v, bits.below(2, u.size).astype(np.bool_)
    return np.where(negative, -x, x)[(x > 0) | ~negative]  # a zero once, not twice
