"""Scalar gradients as they travel: rounded once, the same on both sides."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.wire.numbers import (
    GRID,
    LARGEST,
    MAX_SCALARS,
    WIRES,
    bfloat16,
    pack_scalars,
    packed_scalars,
    require_rounded,
    scalar,
    unpack_scalars,
)

floats = st.floats(width=64, allow_nan=True, allow_infinity=True)
clips = st.one_of(st.just(math.inf), st.floats(2.0**-130, 2.0**127, width=32))


@given(floats, clips, st.sampled_from(WIRES))
def test_a_scalar_is_within_the_clip_and_rounded_only_once(found, clip, wire):
    sent = scalar(found, clip, wire)
    if math.isnan(sent):
        assert not math.isfinite(found) or (wire == "sign" and min(abs(found), clip) < GRID)
        return
    if wire == "sign":
        assert sent == math.copysign(1, found)
        return
    assert abs(sent) <= min(clip, LARGEST)
    assert (sent / GRID).is_integer()
    np.testing.assert_equal(scalar(sent, clip, wire), sent)
    require_rounded(np.array([sent], np.float32), wire)
    assert sent == 0 or (sent > 0) == (found > 0)
    if abs(found) < min(clip, LARGEST) - GRID:
        relative = {"exact": 2.0**-24, "compact": 2.0**-7}[wire]
        assert abs(sent - found) <= abs(found) * relative * (1 + 1e-6) + GRID / 2


@pytest.mark.parametrize(("wire", "skipped"), [("exact", False), ("compact", False), ("sign", False), ("sign", True)])
def test_scalars_in_another_number_of_bytes_or_too_many_are_refused(wire, skipped):
    size = packed_scalars(9, wire, skipped)
    for wrong in (0, size - 1, size + 1):
        with pytest.raises(FedKSeedError, match=f"take {size} bytes; got {wrong}"):
            unpack_scalars(bytes(wrong), 9, wire, skipped)
    for many in (MAX_SCALARS + 1, 1 << 40):  # the bytes that they would take are never asked for
        with pytest.raises(FedKSeedError, match=f"{many:,} scalar gradients, at most 16,777,216, take"):
            unpack_scalars(bytes(size), many, wire, skipped)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_sixteen_bits_are_pytorchs_bfloat16(found):
    expected = float(torch.tensor(found, dtype=torch.float32).to(torch.bfloat16))
    if 2.0**-8 <= abs(expected) < LARGEST:  # the numbers of 16 bits that all lie on the grid
        assert scalar(expected, math.inf, "compact") == expected
    np.testing.assert_equal(float(bfloat16(np.float32(found))), expected)


@pytest.mark.parametrize("clip", [0.3, 100.3, 7e5])
def test_a_rounded_scalar_is_the_largest_of_sixteen_bits_that_does_not_exceed_the_clip(clip):
    limit = float(np.float32(clip))
    for found in (1e39, -1e39):
        sent = scalar(found, limit, "compact")
        assert abs(sent) <= limit
        assert sent * found > 0
        above = np.float32(abs(sent)).view(np.uint32) + np.uint32(1 << 16)
        assert not above.view(np.float32) <= limit


def test_a_step_without_a_difference_has_no_sign():
    assert math.isnan(scalar(0.0, math.inf, "sign"))
    assert scalar(0.0, math.inf, "compact") == 0
    assert [scalar(x, 0.1, "sign") for x in (1e-5, -700.0)] == [1, -1]


@given(st.lists(floats, max_size=40), st.sampled_from(WIRES))
def test_what_is_packed_comes_back(found, wire):
    scalars = np.array([scalar(x, math.inf, wire) for x in found], np.float32)
    data, skipped = pack_scalars(scalars, wire), bool(np.isnan(scalars).any())
    assert len(data) == packed_scalars(scalars.size, wire, skipped)
    again = unpack_scalars(data, scalars.size, wire, skipped)
    np.testing.assert_array_equal(again, scalars)
    assert (np.signbit(again) == np.signbit(scalars)).all()


def test_a_second_row_of_bits_that_says_nothing_is_refused():
    with pytest.raises(FedKSeedError, match="a NaN or a bit that is not allowed"):
        unpack_scalars(b"\x05\x00", 3, "sign", skipped=True)
