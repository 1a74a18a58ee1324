"""Kinds of messages are rows: those of the package, and one that a program adds."""

import runpy
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from fedkseed import FedKSeedError, Pool, wire
from fedkseed.wire import KINDS, Lack, Run, add_kind, decode, encode, kind_of
from fedkseed.wire.codec import sealed

RUN = Run(Pool(5, 16), bytes(range(32)))


@pytest.fixture
def timings(request):
    """The kind of docs/examples, as a program has it after importing that file."""
    try:
        yield runpy.run_path(str(request.config.rootpath / "docs" / "examples" / "message.py"))["TIMINGS"]
    finally:
        KINDS.pop(128, None)


def some(timings):
    return timings.record(RUN, 7, 12, np.array([0.5, 1.25, 3], np.float32))


def test_numbers_are_those_of_the_specification():
    names = ["Broadcast", "Upload", "Values", "History", "Change", "Delta", "Lack", "Secured", "Masked", "Survivors"]
    names += ["Shares", "Subtotal"]
    assert {number: kind.record.__name__ for number, kind in KINDS.items()} == dict(enumerate(names, 1))
    assert all(kind.number == number for number, kind in KINDS.items())


def test_the_package_exports_what_it_says_and_needs_neither_torch_nor_numba():
    assert all(hasattr(wire, name) for name in wire.__all__)
    code = "import sys, fedkseed.wire; print({'torch', 'numba'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"


def test_an_added_kind_travels(timings):
    message = some(timings)
    data = encode(message)
    assert (data[5], kind_of(data), len(data)) == (128, timings.record, 56 + 8 + 3 * 4 + 4)
    got = decode(data, timings.record)
    assert (got.run, got.round, got.client) == (RUN, 7, 12)
    np.testing.assert_array_equal(got.seconds, message.seconds)


def test_an_added_kind_is_refused_where_its_bytes_do_not_fit(timings):
    data = encode(some(timings))
    for length in range(len(data)):
        with pytest.raises(FedKSeedError, match="cut short"):
            decode(data[:length], timings.record)
    for end, match in ((-8, "report's body must have 20 bytes, got 16"), (60, "report has at least 8 bytes, got 4")):
        with pytest.raises(FedKSeedError, match=match):
            decode(sealed(data[:end]), timings.record)
    with pytest.raises(FedKSeedError, match="this timing report may have flags 0, got 1"):
        decode(sealed(data[:7], b"\x01", data[8:-4]), timings.record)
    with pytest.raises(FedKSeedError, match="none below 0"):
        decode(sealed(data[:-8], np.float32(-1).tobytes()), timings.record)
    with pytest.raises(FedKSeedError, match="expected a message of kind Lack, got Timings"):
        decode(data, Lack)


def test_who_has_not_added_a_kind_refuses_it(timings):
    message = some(timings)
    data = encode(message)
    del KINDS[128]
    assert kind_of(data) is None
    with pytest.raises(FedKSeedError, match="of kind Timings, got kind 128"):
        decode(data, timings.record)
    with pytest.raises(FedKSeedError, match="Timings is no kind of message: add it by add_kind; known are Broadcast,"):
        encode(message)


def test_a_number_or_record_that_is_taken_is_refused(timings):
    for number in (0, 8, 127, 256):
        with pytest.raises(FedKSeedError, match=f"own kinds of messages have numbers 128 to 255, got {number}"):
            add_kind(replace(timings, number=number))
    with pytest.raises(FedKSeedError, match="kind 128 is Timings; Run with number 128 needs"):
        add_kind(replace(timings, record=Run))
    with pytest.raises(FedKSeedError, match="kind 7 is Lack; Lack with number 129 needs a number and a record of its"):
        add_kind(replace(KINDS[7], number=129))
    assert set(KINDS) == {*range(1, 13), 128}
