"""Messages as bytes: nothing lost, nothing accepted that was not sent."""

import json
import struct
import tracemalloc
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import Broadcast, FedKSeedError, KSeed, LocalWork, Pool, Run, Upload, decode, encode
from fedkseed.randomness import draw_directions
from fedkseed.strategy import Settings
from fedkseed.wire import codec
from fedkseed.wire.codec import HEADER, KINDS
from fedkseed.wire.delta import restore
from fedkseed.wire.int8 import compact, pack
from fedkseed.wire.numbers import WIRES, rounded, scalar
from fedkseed.wire.records import MAX_BROADCAST, MAX_SCALARS, Change, History, Lack, Values
from tests.wire.fuzz import BASE, specimens

from . import vectors as made_anew
from .vectors import PATH, fields_of, real, record_of

RNG = np.random.default_rng(0)
SMALL = Run(Pool(5, 256), bytes(range(32)))
VECTORS = json.loads(PATH.read_text())
SPECIMENS = specimens()
# By number in docs/wire.md, "What a decoder refuses": words of the refusal. Values (11) have words of their own.
REFUSALS = {
    1: "at least 60 bytes", 2: "not a fedkseed message", 3: "protocol version", 4: "checksum does not fit",
    5: "expected a message of kind", 6: "family number", 7: "power of two", 8: "may have flags",
    9: "must have|at most 16,777,216",
    10: "not allowed|no number travels as",
    11: "at least one example|rounded to multiples|beyond|finite|positive number|at least 0|at least one step|"
    "rows of counts|add up|directions lie below|in order|weigh at least",
}  # fmt: skip
every_specimen = pytest.mark.parametrize("name", SPECIMENS)


def make(size: int, count: int, family: str, pro: bool, wire: str) -> tuple[Broadcast, Upload]:
    run = Run(Pool((1 << 64) - 1, size, family), bytes(range(32)))
    p = rounded(RNG.random(size), wire) if pro else None
    down = Broadcast(run, 7, 3e-7, 5e-4, count, 1e4, rounded(RNG.normal(size=size), wire), 3, p, wire)
    found = [scalar(x, 1e4, wire) for x in RNG.normal(size=count)]
    return down, Upload(run, 7, 12, 345, 2.5, np.array(found, np.float32), wire)


def same(a, b) -> bool:
    return fields_of(a) == fields_of(b)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("pro", [False, True])
@pytest.mark.parametrize(("size", "family"), [(1, "hashed"), (1 << 16, "hadamard"), (100_000, "gaussian")])
def test_what_is_encoded_is_decoded(size, family, pro, wire):
    down, up = make(size, 50, family, pro, wire)
    assert same(decode(encode(down), Broadcast), down)
    assert same(decode(encode(up), Upload), up)


@every_specimen
def test_every_kind_and_flag_is_decoded(name):
    message = SPECIMENS[name]
    assert same(decode(encode(message), type(message)), message)


# --- the published vectors ----------------------------------------------------------------------


def test_the_vectors_are_those_that_the_command_writes():
    assert PATH.read_text() == made_anew.text(), "run `make vectors` and look at what has changed"


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: vector["name"])
def test_published_messages_encode_and_decode_to_the_bit(vector):
    record, data = record_of(vector["kind"], vector["fields"]), bytes.fromhex(vector["bytes"])
    assert encode(record) == data
    assert same(decode(data, type(record)), record)


def test_a_published_difference_is_restored():
    kept, delta, whole = (bytes.fromhex(VECTORS["delta"][name]) for name in ("kept", "delta", "whole"))
    assert restore(delta, kept) == whole


@pytest.mark.parametrize("vector", VECTORS["deltas"], ids=lambda vector: vector["name"])
def test_published_differences_are_answered_by_a_lack_or_refused(vector):
    delta, kept = bytes.fromhex(vector["delta"]), vector["kept"] and bytes.fromhex(vector["kept"])
    if vector["outcome"] == "lack":
        assert restore(delta, kept) is None
        return
    with pytest.raises(FedKSeedError, match="a delta"):
        restore(delta, kept)


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["name"])
def test_published_messages_with_a_defect_are_refused(vector):
    kind = next(row.record for row in KINDS.values() if row.record.__name__ == vector["kind"])
    with pytest.raises(FedKSeedError, match=REFUSALS[vector["refusal"]]):
        decode(bytes.fromhex(vector["bytes"]), kind)


def test_published_draws_roundings_and_codes_are_made():
    for v in VECTORS["draws"]:
        p = None if v["probabilities"] is None else np.array(v["probabilities"], np.float32)
        count = len(v["directions"])
        drawn = draw_directions(int(v["key"], 16), v["round"], v["client"], count, v["size"], p)
        assert drawn.tolist() == v["directions"]
    for v in VECTORS["scalars"]:
        np.testing.assert_equal(scalar(real(v["found"]), real(v["clip"]), v["wire"]), real(v["sent"]))
    for v in VECTORS["compact"]:
        assert pack(compact(np.array(v["numbers"], np.float32))).hex() == v["bytes"]


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "pro", "wire", "down", "up"),
    [
        (4096, False, "exact", 88 + 4 * 4096, 76 + 4 * 200),
        (4096, False, "compact", 88 + 4096 + 4 * 32, 76 + 2 * 200),
        (4096, False, "sign", 88 + 4096 + 4 * 32, 76 + 25),
        (1024, True, "exact", 88 + 8 * 1024, 76 + 4 * 200),
        (1024, True, "compact", 88 + 2 * (1024 + 4 * 8), 76 + 2 * 200),
        (1024, True, "sign", 88 + 2 * (1024 + 4 * 8), 76 + 25),
    ],
)
def test_sizes_are_those_of_the_specification(size, pro, wire, down, up):
    assert tuple(len(encode(message)) for message in make(size, 200, "hadamard", pro, wire)) == (down, up)


@pytest.mark.parametrize(("size", "pro", "limit"), [(4096, False, 4_900), (1024, True, 2_700)])
def test_a_round_of_200_steps_stays_within_the_limit_by_default(size, pro, limit):
    """Down plus up of a client that has kept nothing, every header counted."""
    run = Run(Pool(5, size), bytes(32))
    strategy = KSeed.make(Settings(run, LocalWork(1)), importance=pro)
    found = np.array([scalar(x, np.inf, "compact") for x in RNG.normal(size=200)], np.float32)
    up = Upload(run, 0, 3, 10, 1.0, found, "compact")
    after = strategy.aggregate(strategy.server.init(), [up])
    down = encode(strategy.server.broadcast(after))
    assert len(down) + len(encode(up)) <= limit


def test_eight_bits_a_coefficient_keep_both_links_under_nine_thousand_bytes():
    run, none = Run(Pool(5, 4096), bytes(32)), np.empty(0, np.uint32)
    c = compact(RNG.normal(size=4096))
    down = encode(Broadcast(run, 7, 3e-7, 5e-4, 1, np.inf, c, wire="compact"))
    up = encode(Change(run, 7, 12, 345, 2.5, 0, c, none, "compact"))
    assert (len(down), len(up)) == (56 + 28 + 4096 + 128 + 4, 56 + 28 + 4096 + 128 + 4)
    # LoRA (r = 8 on q and v) of SmolLM2-135M has 460,800 numbers of 4 bytes on both links
    assert 2 * 4 * 460_800 / (len(down) + len(up)) > 400


def test_weights_are_not_copied_by_the_decoder():
    data = encode(SPECIMENS["values"])
    values = decode(data, Values).values
    assert np.shares_memory(values, np.frombuffer(data, np.uint8))


# --- refusals -----------------------------------------------------------------------------------


@every_specimen
def test_every_cut_and_every_extension_is_refused(name):
    message = SPECIMENS[name]
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(FedKSeedError, match=r"cut short|not a fedkseed message"):
            decode(data[:length], type(message))
    for extra in (b"\0", data):
        with pytest.raises(FedKSeedError, match="checksum"):
            decode(data + extra, type(message))


@every_specimen
def test_every_flipped_bit_is_refused(name):
    message = SPECIMENS[name]
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


NAN = struct.pack("<f", np.nan)


@pytest.mark.parametrize(
    ("name", "at", "new", "match"),
    [
        ("upload, exact", 0, b"PK", "not a fedkseed message"),
        ("upload, exact", 4, b"\x09", "protocol version 9, this program speaks 2"),
        ("upload, exact", 5, b"\x01", "expected a message of kind Upload, got Broadcast"),
        ("upload, exact", 5, b"\x63", "got kind 99"),
        ("upload, exact", 6, b"\x09", "family number 9"),
        ("upload, exact", 7, b"\x01", "this upload may have flags 0 or 2 or 4 or 12, got 1"),
        ("upload, exact", 7, b"\x06", "got 6"),
        ("upload, exact", 7, b"\x08", "got 8"),
        ("upload, exact", 7, b"\x02", "must have 28 bytes"),
        ("upload, exact", 20, b"\x0e\0\0\0", "power of two"),
        ("upload, exact", 60, b"\0\0\0\0", "at least one example"),
        ("upload, exact", 64, b"\x01\0\xc0\x7f", "no number travels as 7fc00000, got 7fc00001"),
        ("upload, exact", 68, b"\xff\xff\xff\xff", "must have 17179869196 bytes"),
        ("upload, exact", 72, b"\x01\0\xc0\x7f", "a NaN or a bit that is not allowed"),
        ("upload, exact", 72, struct.pack("<f", np.inf), "1 beyond"),
        ("upload, compact", 72, b"\xc1\x7f", "a NaN or a bit that is not allowed"),
        ("upload, compact", 72, b"\x80\x7f", "1 beyond"),
        ("upload, sign", 73, b"\x03", "a NaN or a bit that is not allowed"),  # there are 9 bits
        ("upload, sign, some skipped", 72, b"\xff", "a NaN or a bit that is not allowed"),  # of one that was skipped
        ("upload, sign, some skipped", 74, b"\0\0", "a NaN or a bit that is not allowed"),  # none was
        ("values", 7, b"\x01", "flags 0, got 1"),
        ("values", 56, struct.pack("<d", -1), "lr must be a positive number"),
        ("values", 64, struct.pack("<Q", 1 << 60), "must have"),
        ("values", 72, NAN, "finite"),
        ("history", 7, b"\x02", "flags 0 or 1, got 2"),
        ("history", 8, struct.pack("<I", 3), "must have"),  # a round before the history begins
        ("history", 64, struct.pack("<I", 5), "must have"),
        ("history", 68, struct.pack("<I", 1 << 31), "must have"),
        ("history", 80, struct.pack("<I", 3), "counts add up to 10"),
        ("history, nothing missed", 7, b"\x01", "names directions has some, got none"),
        ("change, exact", 76, struct.pack("<Q", 10), "must have"),
        ("change, exact, counts", 84, struct.pack("<I", 5), "counts add up to 10"),
        ("change, exact, counts", 60, struct.pack("<I", 0), "at least one example"),
        ("change, exact, counts", 7, b"\x01", "flags 0 or 2, got 1"),
        ("change, exact", 7, b"\x04", "flags 0 or 2, got 4"),
        ("change, exact", 64, b"\0\0\xc0\xff", "no number travels as 7fc00000, got ffc00000"),
        ("change, compact", 7, b"\x00", "must have"),  # 9 numbers of 32 bits need more
        ("change, compact", 88, b"\x80", "scale or a code that is not allowed"),
        ("broadcast, compact", 7, b"\x06", "flags 0 or 1 or 2 or 3 or 4 or 5, got 6"),
        ("broadcast, compact", 84, struct.pack("<f", np.inf), "scale or a code that is not allowed"),
        ("broadcast, compact, probabilities", 7, b"\x02", "must have"),  # its probabilities are too many bytes
        ("broadcast, sign", 72, NAN, "clip must be a positive number"),
        ("broadcast, sign", 76, struct.pack("<II", 1 << 20, 1 << 20), "at most 16777216 directions"),
        ("delta", 7, b"\x01", "this delta may have flags 0, got 1"),
        ("lack", 7, b"\x01", "this lack may have flags 0, got 1"),
        ("upload, exact", 6, b"\x05", "must have|at least"),  # of a family with a basis, whose digest is lacking
        ("upload, informed", 6, b"\x02", "must have|NaN"),
        ("upload, informed", 20, struct.pack("<I", 1 << 20), "holds 1 to 1048576 directions"),
        ("lack, mixed", 20, struct.pack("<I", 6), "power of two"),
        ("broadcast, separable", 20, struct.pack("<I", 7), "power of four"),
    ],
)
def test_a_hostile_message_with_a_valid_checksum_is_refused(name, at, new, match):
    whole = SPECIMENS[name]
    with pytest.raises(FedKSeedError, match=match):
        decode(sealed(encode(whole), at, new), type(whole))


@pytest.mark.parametrize("name", ["delta", "lack"])
def test_a_body_that_is_cut_short_is_refused_also_with_a_valid_checksum(name):
    whole = SPECIMENS[name]
    data = encode(whole)[:59]
    with pytest.raises(FedKSeedError, match=r"the body of this (delta|lack) has at least [84] bytes, got 3"):
        decode(data + struct.pack("<I", zlib.crc32(data)), type(whole))


@pytest.mark.parametrize("length", range(56, 88))
def test_a_header_without_all_of_its_basis_is_refused_also_with_a_valid_checksum(length):
    data = encode(SPECIMENS["lack, mixed"])[:length]
    with pytest.raises(FedKSeedError, match="a message of mixed directions has at least 92 bytes"):
        decode(data + struct.pack("<I", zlib.crc32(data)), Lack)


def test_a_message_names_its_basis_after_the_header():
    informed = SPECIMENS["upload, informed"]
    with_basis, without = encode(informed), encode(replace(informed, run=Run(Pool(informed.run.pool.key, 16), BASE)))
    assert with_basis[56:88] == informed.run.pool.basis
    assert (with_basis[:6], with_basis[7:56], with_basis[88:-4]) == (without[:6], without[7:56], without[56:-4])
    other = sealed(with_basis, 56, bytes(32))
    assert decode(other, Upload).run.pool.basis == bytes(32)


def test_a_message_of_another_basis_is_refused_with_both_digests():
    mine = SPECIMENS["upload, informed"].run
    theirs = Run(replace(mine.pool, basis=bytes(32)), mine.base)
    with pytest.raises(FedKSeedError, match=f"for the basis {'00' * 32}, this party has {mine.pool.basis.hex()}"):
        mine.require(theirs)
    with pytest.raises(FedKSeedError, match=r"the message is for Pool\(.*family='hadamard'\), this party has Pool"):
        mine.require(SMALL)
    mine.require(replace(mine))


def test_a_direction_of_a_history_may_be_any_of_the_pool():
    whole = SPECIMENS["history, directions"]
    assert not same(decode(sealed(encode(whole), 92, b"\xff"), History), whole)


@given(st.sampled_from(list(SPECIMENS.values())), st.integers(0, 1 << 30), st.binary(min_size=1, max_size=8))
def test_no_change_with_a_valid_checksum_crashes_the_decoder(message, place, new):
    data = encode(message)
    with suppress(FedKSeedError):  # decoded or refused: either is right, another exception is not
        decode(sealed(data, place % (len(data) - 4 - len(new)), new), type(message))


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_decode_or_be_refused(data):
    for kind in KINDS.values():
        with pytest.raises(FedKSeedError):
            decode(data, kind.record)


def test_numbers_that_were_not_rounded_are_not_sent_as_if_they_were():
    for wire in ("compact", "sign"):
        with pytest.raises(FedKSeedError, match=r"must be rounded by compact\(\) first"):
            Broadcast(SMALL, 7, 3e-7, 5e-4, 3, 1e4, RNG.normal(size=256).astype(np.float32), wire=wire)
    with pytest.raises(FedKSeedError, match="no wire of this message is called 'zip'; choose one of exact, compact"):
        Broadcast(SMALL, 7, 3e-7, 5e-4, 3, 1e4, np.zeros(256, np.float32), wire="zip")
    with pytest.raises(FedKSeedError, match="no wire of this message is called 'sign'; choose one of exact, compact"):
        Change(SMALL, 0, 1, 1, 1.0, 0, np.ones(2, np.float32), np.empty(0, np.uint32), "sign")


def test_a_pool_too_large_to_broadcast_is_refused():
    run = Run(Pool(0, 1 << 21, "gaussian"), bytes(32))
    with pytest.raises(FedKSeedError, match="at most 1048576 coefficients"):
        Broadcast(run, 0, 1.0, 1.0, 1, 1.0, np.zeros(1 << 21, np.float32))


@pytest.mark.parametrize("beyond", [-1, 1 << 32])
def test_a_number_that_the_wire_can_not_carry_is_refused_when_it_is_encoded(beyond):
    change, delta, subtotal = (SPECIMENS[name] for name in ("change, exact", "delta", "subtotal"))
    for message in [
        *(replace(change, **{name: beyond}) for name in ("round", "client", "skipped")),
        *(replace(delta, **{name: beyond}) for name in ("kept", "whole")),
        *(replace(subtotal, **{name: beyond}) for name in ("round", "client", "skipped")),
        replace(SPECIMENS["lack"], client=beyond),
        replace(SPECIMENS["shares"], client=beyond),
    ]:
        with pytest.raises(FedKSeedError, match="is beyond the bits that it travels in"):
            encode(message)


@pytest.mark.parametrize("skipped", [False, True])
def test_signs_take_no_more_than_sixty_times_their_bytes(skipped):
    """A float32 is 32 times a bit; checks look at some of them at a time."""
    scalars = np.ones(1 << 20, np.float32)
    scalars[: int(skipped)] = np.nan
    data = encode(Upload(SMALL, 0, 1, 1, 1.0, scalars, "sign"))
    tracemalloc.start()
    try:
        assert decode(data, Upload).skipped == skipped
        assert tracemalloc.get_traced_memory()[1] < 60 * (1 << 17) + 1_500_000  # the copies of a part
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["sign", "sign with skipped", "compact change"])
def test_a_small_message_that_announces_many_numbers_is_refused_before_it_takes_memory(name):
    """Signs decoded to a hundred times their bytes, whatever their number."""
    flags, count = {"sign": 4, "sign with skipped": 12, "compact change": 2}[name], MAX_SCALARS + 8
    if name == "compact change":
        kind, fixed, count = KINDS[5], (0, 1, 0, 0, 0, MAX_BROADCAST + 1), MAX_BROADCAST + 1
        body = bytes(-(-count // 128) * 4 + count)
    else:
        kind, fixed, body = KINDS[2], (0, 1, 0, count), bytes(count // 8 * (1 + flags // 8))
    pool = SMALL.pool
    header = HEADER.pack(
        b"FKSd", codec.VERSION, kind.number, pool.record.number, flags, 0, pool.key, pool.size - 1, SMALL.base
    )
    data = codec.sealed(header, kind.fixed.pack(*fixed), body)
    tracemalloc.start()
    try:
        with pytest.raises(FedKSeedError, match=rf"{count:,} scalar gradients, at most|announces {count:,}"):
            decode(data, Upload, Change)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
