"""What travels around a message: every refusal, and what parties of different versions can still tell each other."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.network.protocol.envelope import (
    HEAD,
    MAX_RECIPE,
    MAX_TEXT,
    TASK,
    UNSIGNED,
    Reply,
    Status,
    Task,
    printable,
    recipe_digest,
)

RECIPE = b"seed = 3\n"


def task(**changes) -> Task:
    values = {"client": 2, "seconds": 600.0, "digest": recipe_digest(RECIPE), "recipe": RECIPE, "message": b"m"}
    return Task(**values | changes)


@given(
    st.binary(max_size=300),
    st.booleans(),
    st.integers(0, (1 << 32) - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=300),
    st.binary(min_size=64, max_size=64),
)
def test_a_task_comes_back_as_it_was(message, with_recipe, client, nonce, issued, certificate, signature):
    made = task(
        message=message, recipe=RECIPE if with_recipe else b"", client=client, nonce=nonce, issued=issued,
        certificate=certificate, signature=signature,
    )  # fmt: skip
    assert Task.decode(made.encode()) == made
    assert made.hashed() == sha256(made.encode()[:-64]).digest()


def test_a_task_costs_194_bytes_an_answer_70_and_a_refusal_6():
    assert len(task(recipe=b"", message=b"").encode()) == HEAD.size + TASK.size + len(UNSIGNED) == 194
    assert len(Reply(Status.DONE, b"").encode()) == 70
    assert len(Reply(Status.UNPREPARED).encode()) == 6


@given(st.binary(max_size=300), st.binary(min_size=64, max_size=64))
def test_a_reply_comes_back_as_it_was(message, signature):
    made = Reply(Status.DONE, message, signature=signature)
    assert Reply.decode(made.encode()) == made


def test_a_refusal_is_laid_out_as_in_version_1_and_the_other_way_round():
    assert Reply(Status.REFUSED, text="no").encode() == b"FKSt\x03\x02no"
    assert Reply.decode(b"FKSt\x01\x02no") == Reply(Status.REFUSED, text="no")
    with pytest.raises(FedKSeedError, match="speaks version 1 of tasks, this one 3"):
        Reply.decode(b"FKSt\x01\x00" + bytes(100))


def test_an_answer_without_room_for_a_signature_is_refused():
    with pytest.raises(FedKSeedError, match="begins with a signature of 64 bytes, got 63"):
        Reply.decode(b"FKSt\x03\x00" + bytes(63))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_task_or_a_reply_or_refused(data):
    for kind in (Task, Reply):
        for head in (b"", b"FKSt\x03\x00", b"FKSt\x03\x02"):
            try:
                made = kind.decode(head + data)
            except FedKSeedError:
                continue
            assert isinstance(made, kind)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seconds": 0.0}, "leaves a client some seconds, got 0.0"),
        ({"seconds": float("nan")}, "leaves a client some seconds, got nan"),
        ({"recipe": b"x" * (MAX_RECIPE + 1)}, "at most 65536 bytes, got 65537"),
        ({"recipe": b"other"}, "does not have the digest"),
        ({"certificate": b"x" * (1 << 16)}, "at most 65535 bytes, got 65536"),
    ],
)
def test_a_task_that_is_not_allowed_is_refused(changes, match):
    with pytest.raises(FedKSeedError, match=match):
        task(**changes)


def test_a_task_that_announces_more_than_it_holds_is_refused():
    data = bytearray(task().encode())
    data[HEAD.size + 24 : HEAD.size + 28] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(FedKSeedError, match="2147483648 bytes, a certificate of 0 and 0 links of 32, 10 bytes"):
        Task.decode(bytes(data))
    data = bytearray(task().encode())
    data[HEAD.size + 28 : HEAD.size + 30] = b"\x02\x00"
    with pytest.raises(FedKSeedError, match="9 bytes, a certificate of 2 and 0 links of 32, 10 bytes are there"):
        Task.decode(bytes(data))
    with pytest.raises(FedKSeedError, match="at least 194 bytes, got status 0 and"):
        Task.decode(task(recipe=b"", message=b"").encode()[:-1])
    with pytest.raises(FedKSeedError, match="at least 194 bytes, got status 1 and"):
        Task.decode(b"FKSt\x03\x01" + task().encode()[6:])


def test_a_refusal_of_another_version_can_be_read_and_nothing_else_of_it():
    refusal = bytearray(Reply(Status.REFUSED, text="get fedkseed 9").encode())
    refusal[4] = 9
    assert Reply.decode(bytes(refusal)).text == "get fedkseed 9"
    for other in (Reply(Status.DONE, b"x").encode(), task().encode()):
        data = bytearray(other)
        data[4] = 9
        with pytest.raises(FedKSeedError, match="speaks version 9 of tasks, this one 3"):
            (Task if other[5:6] == b"\0" and len(other) > 20 else Reply).decode(bytes(data))


def test_a_text_of_another_party_is_one_line_that_moves_no_cursor():
    assert printable("a\x1b[2J\nb\u202ec") == "a [2J b c"
    assert len(Reply.decode(Reply(Status.FAILED, text="x" * 10_000).encode()).text) == MAX_TEXT
