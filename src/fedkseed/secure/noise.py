"""Exact samples of the discrete Gaussian distribution, from random bits and whole numbers alone.

    P(x) ∝ exp(−x² / 2σ²) for whole x

No floating-point number is involved, so the lowest bits of a sample say nothing of what it was added to.

Source: Canonne, Kamath and Steinke, 2020, Algorithms 1 to 3, https://arxiv.org/abs/2004.00010
"""

from collections.abc import Callable
from math import isqrt

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

BLOCK = 1 << 12  # bytes of a stream that are made at once


class Bits:
    """Uniform whole numbers from ChaCha20's stream under a key."""

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
        self._data, self._at = b"", 0

    def below(self, bound: int) -> int:
        """A uniform number of 0 to bound − 1; those at or above the bound are drawn again."""
        size = (bound.bit_length() + 7) // 8
        mask = (1 << bound.bit_length()) - 1
        while True:
            if self._at + size > len(self._data):
                self._data, self._at = self._stream.update(bytes(max(BLOCK, size))), 0
            found = int.from_bytes(self._data[self._at : self._at + size], "little") & mask
            self._at += size
            if found < bound:
                return found


def discrete_gaussian(variance: int, count: int, key: bytes) -> NDArray[np.int64]:
    """Independent samples with σ² = `variance`, at least 1, shape (count,); the same key gives the same ones."""
    bits = Bits(key)
    return np.array([_gaussian(variance, bits.below) for _ in range(count)], np.int64)


def _gaussian(variance: int, below: Callable[[int], int]) -> int:
    """Discrete Laplace of scale t = ⌊σ⌋ + 1, kept with probability exp(−(|y| − σ² / t)² / 2σ²)."""
    t = isqrt(variance) + 1
    while True:
        y = _laplace(t, below)
        if _happens((abs(y) * t - variance) ** 2, 2 * variance * t * t, below):
            return y


def _laplace(t: int, below: Callable[[int], int]) -> int:
    """P(x) ∝ exp(−|x| / t)."""
    while True:
        u = below(t)
        if not _happens(u, t, below):
            continue
        v = 0
        while _happens(1, 1, below):
            v += 1
        x, negative = u + t * v, below(2)
        if x or not negative:
            return -x if negative else x


def _happens(numerator: int, denominator: int, below: Callable[[int], int]) -> bool:
    """An event of probability exp(−numerator / denominator)."""
    while numerator > denominator:
        if not _below_one(1, 1, below):
            return False
        numerator -= denominator
    return _below_one(numerator, denominator, below)


def _below_one(numerator: int, denominator: int, below: Callable[[int], int]) -> bool:
    """The same for a quotient of at most 1: the first k with no event of probability quotient / k is odd."""
    k = 1
    while below(k * denominator) < numerator:
        k += 1
    return k % 2 == 1
