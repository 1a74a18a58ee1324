"""Messages as bytes: nothing lost, nothing accepted that was not sent."""

import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import Broadcast, FedKSeedError, Pool, Run, Upload, decode, encode
from fedkseed.compact import compact
from fedkseed.messages import Change, History, Values

from .strategies.test_kseed import upload

RNG = np.random.default_rng(0)
SMALL = Run(Pool(5, 256), bytes(range(32)))


def make(size: int, pairs: int, family: str = "hadamard", pro: bool = False) -> tuple[Broadcast, Upload]:
    run = Run(Pool((1 << 64) - 1, size, family), bytes(range(32)))
    p = RNG.random(size).astype(np.float32) if pro else None
    down = Broadcast(run, 7, 3e-7, 5e-4, pairs, 1e4, RNG.normal(size=size).astype(np.float32), 3, p)
    directions = RNG.integers(0, size, pairs).astype(np.uint32)
    return down, Upload(run, 7, 12, 345, 2.5, directions, RNG.normal(size=pairs).astype(np.float32))


def others() -> list[Values | History | Change | Broadcast]:
    """Messages of the algorithms that don't send K coefficients, and messages of 8 bits a number."""
    run = Run(Pool(5, 1 << 32, "rademacher"), bytes(range(32)))
    numbers = RNG.normal(size=9).astype(np.float32)
    counts = np.array([[2, 1], [0, 2], [3, 1]], np.uint32)
    none, directions = np.empty(0, np.uint32), np.arange(9, dtype=np.uint32) + 7
    return [
        Values(run, 7, 3e-4, numbers),
        History(run, 7, 3e-4, 4, counts, none, numbers),
        History(run, 7, 3e-4, 4, counts.sum(1, keepdims=True).astype(np.uint32), directions, numbers),
        History(run, 7, 3e-4, 7, counts[:0], none, numbers[:0]),
        Change(run, 7, 12, 345, 2.5, 3, numbers, none),
        Change(run, 7, 12, 345, 2.5, 0, numbers, np.array([4, 5], np.uint32)),
        Change(run, 7, 12, 345, 2.5, 0, compact(numbers), none, 8),
        Broadcast(SMALL, 7, 3e-7, 5e-4, 3, 1e4, compact(RNG.normal(size=256)), bits=8),
        Broadcast(SMALL, 7, 3e-7, 5e-4, 3, 1e4, compact(RNG.normal(size=256)), 1, compact(RNG.random(256)), 8),
    ]


def same(a, b) -> bool:
    return all(np.array_equal(x, y) if isinstance(x := getattr(a, n), np.ndarray) else x == getattr(b, n)
               for n in a.__slots__ for y in [getattr(b, n)])  # fmt: skip


@pytest.mark.parametrize("pro", [False, True])
@pytest.mark.parametrize(("size", "family"), [(1, "hashed"), (1 << 16, "hadamard"), (100_000, "gaussian")])
def test_what_is_encoded_is_decoded(size, family, pro):
    down, up = make(size, 50, family, pro)
    assert same(decode(encode(down), Broadcast), down)
    assert same(decode(encode(up), Upload), up)


@pytest.mark.parametrize("message", others(), ids=lambda m: type(m).__name__)
def test_what_other_algorithms_send_is_decoded(message):
    assert same(decode(encode(message), type(message)), message)


def test_weights_are_not_copied_by_the_decoder():
    data = encode(others()[0])
    values = decode(data, Values).values
    assert np.shares_memory(values, np.frombuffer(data, np.uint8))


def test_an_upload_from_unlimited_seeds_is_decoded():
    run = Run(Pool(3, 1 << 32, "rademacher"), bytes(32))
    up = upload(0, {0: 1.0, (1 << 32) - 1: -2.0}, run=run)
    assert same(decode(encode(up), Upload), up)


def test_an_upload_without_a_finite_step_is_sent_empty():
    empty = upload(0, {})
    assert decode(encode(empty), Upload).scalars.size == 0


@pytest.mark.parametrize(("size", "pro", "paper"), [(4096, False, 17_988), (1024, True, 9_796)])
def test_a_round_of_200_steps_takes_no_more_bytes_than_the_paper_says(size, pro, paper):
    down, up = make(size, 200, pro=pro)
    assert len(encode(down)) + len(encode(up)) <= paper


@pytest.mark.parametrize("message", [*make(16, 5, pro=True), *others()], ids=lambda m: type(m).__name__)
def test_every_cut_and_every_extension_is_refused(message):
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(FedKSeedError, match=r"cut short|not a fedkseed message"):
            decode(data[:length], type(message))
    for extra in (b"\0", data):
        with pytest.raises(FedKSeedError, match="checksum"):
            decode(data + extra, type(message))


@pytest.mark.parametrize("message", [*make(16, 5), *others()], ids=lambda m: type(m).__name__)
def test_every_flipped_bit_is_refused(message):
    data = encode(message)
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FedKSeedError):
            decode(bytes(broken), type(message))


def sealed(data: bytes, at: int, new: bytes) -> bytes:
    """A message with some bytes replaced and a checksum that fits: what a hostile party can send."""
    changed = data[:at] + new + data[at + len(new) : -4]
    return changed + struct.pack("<I", zlib.crc32(changed))


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"PK", "not a fedkseed message"),
        (4, b"\x09", "protocol version 9, this program speaks 1"),
        (5, b"\x01", "expected a message of kind Upload, got Broadcast"),
        (5, b"\x63", "got kind 99"),
        (6, b"\x09", "family number 9"),
        (7, b"\x01", "flags 0, got 1"),
        (20, b"\x0e\0\0\0", "power of two"),
        (60, b"\0\0\0\0", "at least one example"),
        (68, b"\xff\xff\xff\xff", "must have"),
        (68, b"\x04\0\0\0", "must have"),
        (72, b"\xff\xff", "0 to 15, got 65535"),
        (82, struct.pack("<f", np.nan), "finite"),
        (82, struct.pack("<f", np.inf), "finite"),
    ],
)
def test_a_hostile_upload_with_a_valid_checksum_is_refused(at, new, message):
    _, up = make(16, 5)
    with pytest.raises(FedKSeedError, match=message):
        decode(sealed(encode(up), at, new), Upload)


@pytest.mark.parametrize(
    ("message", "at", "new", "match"),
    [
        (0, 7, b"\x01", "flags 0, got 1"),
        (0, 56, struct.pack("<d", -1), "lr must be a positive number"),
        (0, 64, struct.pack("<Q", 1 << 60), "must have"),
        (0, 72, struct.pack("<f", np.nan), "finite"),
        (1, 7, b"\x02", "flags 0 or 1, got 2"),
        (1, 8, struct.pack("<I", 3), "must have"),  # a round before the history begins
        (1, 64, struct.pack("<I", 5), "must have"),
        (1, 68, struct.pack("<I", 1 << 31), "must have"),
        (1, 80, struct.pack("<I", 3), "counts add up to 10"),
        (2, 92, b"\xff", None),  # another direction below 2^32 is one
        (4, 76, struct.pack("<Q", 10), "must have"),
        (5, 84, struct.pack("<I", 5), "counts add up to 10"),
        (5, 60, struct.pack("<I", 0), "at least one example"),
        (5, 7, b"\x01", "flags 0 or 2, got 1"),
        (6, 7, b"\x00", "must have"),  # 9 numbers of 32 bits need more
        (6, 88, b"\x80", "scale or a code that is not allowed"),
        (7, 7, b"\x04", "flags 0 or 1 or 2 or 3, got 4"),
        (7, 84, struct.pack("<f", np.inf), "scale or a code that is not allowed"),
        (8, 7, b"\x02", "must have"),  # its probabilities are too many bytes
    ],
)
def test_a_hostile_message_of_another_algorithm_is_refused(message, at, new, match):
    whole = others()[message]
    data = sealed(encode(whole), at, new)
    if match is None:
        assert not same(decode(data, type(whole)), whole)
        return
    with pytest.raises(FedKSeedError, match=match):
        decode(data, type(whole))


@given(st.sampled_from(others()), st.integers(0, 1 << 30), st.binary(min_size=1, max_size=8))
def test_no_change_of_another_algorithms_message_crashes_the_decoder(message, place, new):
    data = encode(message)
    with suppress(FedKSeedError):
        decode(sealed(data, place % (len(data) - 4 - len(new)), new), type(message))


def test_eight_bits_a_coefficient_keep_both_links_under_nine_thousand_bytes():
    run, none = Run(Pool(5, 4096), bytes(32)), np.empty(0, np.uint32)
    c = compact(RNG.normal(size=4096))
    down = encode(Broadcast(run, 7, 3e-7, 5e-4, 1, np.inf, c, bits=8))
    up = encode(Change(run, 7, 12, 345, 2.5, 0, c, none, 8))
    assert (len(down), len(up)) == (56 + 28 + 4096 + 128 + 4, 56 + 28 + 4096 + 128 + 4)
    # LoRA (r = 8 on q and v) of SmolLM2-135M has 460,800 numbers of 4 bytes on both links
    assert 2 * 4 * 460_800 / (len(down) + len(up)) > 400


def test_numbers_that_were_not_rounded_are_not_sent_as_if_they_were():
    with pytest.raises(FedKSeedError, match=r"must be rounded by compact\(\) first"):
        Broadcast(SMALL, 7, 3e-7, 5e-4, 3, 1e4, RNG.normal(size=256).astype(np.float32), bits=8)
    with pytest.raises(FedKSeedError, match="8 or 32 bits, got 4"):
        Broadcast(SMALL, 7, 3e-7, 5e-4, 3, 1e4, np.zeros(256, np.float32), bits=4)


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_decode_or_be_refused(data):
    for kind in (Broadcast, Upload, Values, History, Change):
        with pytest.raises(FedKSeedError):
            decode(data, kind)


@given(st.integers(0, 1 << 30), st.binary(min_size=1, max_size=8))
def test_no_change_with_a_valid_checksum_crashes_the_decoder(place, new):
    _, up = make(16, 5)
    data = encode(up)
    at = place % (len(data) - 4 - len(new))
    with suppress(FedKSeedError):  # decoded or refused: either is right, another exception is not
        decode(sealed(data, at, new), Upload)


def test_a_pool_too_large_to_broadcast_is_refused():
    run = Run(Pool(0, 1 << 21, "gaussian"), bytes(32))
    with pytest.raises(FedKSeedError, match="at most 1048576 coefficients"):
        Broadcast(run, 0, 1.0, 1.0, 1, 1.0, np.zeros(1 << 21, np.float32))


@pytest.mark.parametrize("skipped", [-1, 1 << 32])
def test_a_number_that_the_wire_can_not_carry_is_refused_when_a_record_is_made(skipped):
    run = Run(Pool(5, 1 << 32, "rademacher"), bytes(32))
    with pytest.raises(FedKSeedError, match="skipped steps has 32 bits"):
        Change(run, 0, 1, 1, 1.0, skipped, np.zeros(2, np.float32), np.empty(0, np.uint32))
