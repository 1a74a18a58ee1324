"""Eight bits a number, and the same numbers on both sides."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedkseed import FedKSeedError
from fedkseed.wire.int8 import BLOCK, compact, pack, packed_size, unpack

numbers = arrays(
    np.float32, st.integers(0, 3 * BLOCK), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(numbers)
def test_what_is_packed_comes_back_and_is_not_rounded_twice(values):
    rounded = compact(values)
    assert rounded.shape == values.shape
    assert np.array_equal(compact(rounded), rounded)
    data = pack(rounded)
    assert len(data) == packed_size(values.size)
    assert np.array_equal(unpack(data, values.size), rounded)


@given(numbers)
def test_a_number_is_off_by_at_most_a_254th_of_the_largest_of_its_block(values):
    rounded = compact(values).astype(float)
    for start in range(0, values.size, BLOCK):
        part = values[start : start + BLOCK].astype(float)
        largest = np.abs(part).max()
        if 1e-30 < largest < 3e38:
            assert np.abs(rounded[start : start + BLOCK] - part).max() <= largest / 254 * (1 + 1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_rounded_to_something(bad):
    with pytest.raises(FedKSeedError, match="only finite numbers can travel"):
        compact(np.array([1.0, bad]))


def test_a_coefficient_takes_little_more_than_a_byte():
    assert packed_size(4096) == 4096 + 4 * 32


def packed(scale: float, *codes: int) -> bytes:
    return struct.pack(f"<f{len(codes)}b", scale, *codes)


@pytest.mark.parametrize(
    "data",
    [
        packed(float("nan"), 127, 0),
        packed(float("inf"), 127, 0),
        packed(-0.5, 127, 0),
        packed(0.0, 127, 0),
        packed(0.5, 0, 0),  # a scale for nothing
        packed(0.5, 64, 0),  # the largest has the code 127
        packed(0.5, -128, 0),
        packed(0.1, 127, 0),  # its lowest bits are not 0: 127 s would be rounded
    ],
)
def test_bytes_that_nobody_packs_are_refused(data):
    with pytest.raises(FedKSeedError, match="scale or a code that is not allowed"):
        unpack(data, 2)


def test_a_tail_of_a_block_has_the_codes_of_its_numbers_alone():
    data = packed(0.5, 127, -3)
    np.testing.assert_array_equal(unpack(data, 2), [63.5, -1.5])
