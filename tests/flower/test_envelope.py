"""What travels around a message: every refusal, and what parties of different versions can still tell each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.flower.envelope import HEAD, MAX_RECIPE, MAX_TEXT, TASK, Reply, Status, Task, digest_of, shown

RECIPE = b"seed = 3\n"


def task(**changes) -> Task:
    return Task(
        **{"client": 2, "seconds": 600.0, "digest": digest_of(RECIPE), "recipe": RECIPE, "message": b"m"} | changes
    )


@given(st.binary(max_size=300), st.booleans(), st.integers(0, (1 << 32) - 1))
def test_a_task_comes_back_as_it_was(message, with_recipe, client):
    made = task(message=message, recipe=RECIPE if with_recipe else b"", client=client)
    assert Task.decode(made.encode()) == made


def test_a_task_costs_34_bytes_and_a_reply_6():
    assert len(task(recipe=b"", message=b"").encode()) == HEAD.size + TASK.size == 34
    assert len(Reply(Status.DONE, b"").encode()) == 6


@given(st.binary(max_size=300))
def test_a_reply_comes_back_as_it_was(message):
    assert Reply.decode(Reply(Status.DONE, message).encode()) == Reply(Status.DONE, message)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_task_or_a_reply_or_refused(data):
    for kind in (Task, Reply):
        for head in (b"", b"FKSt\x01\x00", b"FKSt\x01\x02"):
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
    ],
)
def test_a_task_that_is_not_allowed_is_refused(changes, match):
    with pytest.raises(FedKSeedError, match=match):
        task(**changes)


def test_a_task_that_announces_more_than_it_holds_is_refused():
    data = bytearray(task().encode())
    data[HEAD.size + TASK.size - 4 : HEAD.size + TASK.size] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(FedKSeedError, match="announces a recipe of 2147483648 bytes, 10 are there"):
        Task.decode(bytes(data))
    with pytest.raises(FedKSeedError, match="a task has at least 34 bytes, got 20"):
        Task.decode(task().encode()[:20])


def test_a_refusal_of_another_version_can_be_read_and_nothing_else_of_it():
    refusal = bytearray(Reply(Status.REFUSED, text="get fedkseed 9").encode())
    refusal[4] = 9
    assert Reply.decode(bytes(refusal)).text == "get fedkseed 9"
    for other in (Reply(Status.DONE, b"x").encode(), task().encode()):
        data = bytearray(other)
        data[4] = 9
        with pytest.raises(FedKSeedError, match="speaks version 9 of tasks, this one 1"):
            (Task if other[5:6] == b"\0" and len(other) > 20 else Reply).decode(bytes(data))


def test_a_text_of_another_party_is_one_line_that_moves_no_cursor():
    assert shown("a\x1b[2J\nb\u202ec") == "a [2J b c"
    assert len(Reply.decode(Reply(Status.FAILED, text="x" * 10_000).encode()).text) == MAX_TEXT
