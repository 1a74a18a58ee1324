"""Broadcasts as differences: the same bytes in the end, or the whole."""

import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest

from fedkseed import Broadcast, FedKSeedError, Pool, Run, decode, encode, run_round
from fedkseed.wire.codec import HEADER, kind_of
from fedkseed.wire.delta import lack, restore, shorten
from fedkseed.wire.int8 import compact
from fedkseed.wire.numbers import WIRES, rounded
from fedkseed.wire.records import Delta, Lack

from ..test_round import Federation

RUN = Run(Pool(5, 4096), bytes(range(32)))
RNG = np.random.default_rng(0)


def broadcasts(wire: str, moved: int = 700, pro: bool = False) -> tuple[bytes, bytes]:
    """Of two rounds between which so many coefficients have moved."""
    c, messages = RNG.normal(size=4096), []
    for round_ in (6, 7):
        p = rounded(np.exp(np.abs(c) / 9), wire) if pro else None
        messages.append(encode(Broadcast(RUN, round_, 3e-7, 5e-4, 9, 1e4, rounded(c, wire), 1, p, wire)))
        c[RNG.permutation(4096)[:moved]] += 0.1 * RNG.normal(size=moved)
    return messages[0], messages[1]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("pro", [False, True])
def test_a_message_is_restored_to_the_byte(wire, pro):
    kept, whole = broadcasts(wire, pro=pro)
    sent = shorten(whole, kept)
    assert kind_of(sent) is Delta
    assert len(sent) < len(whole) / 2
    assert restore(sent, kept) == whole


def test_a_message_of_informed_directions_is_restored_and_one_of_another_basis_is_lacking():
    kept, whole = (of_basis(data, b"\1" * 32) for data in broadcasts("compact"))
    sent = shorten(whole, kept)
    assert len(sent) < len(whole) / 2
    assert restore(sent, kept) == whole
    other = of_basis(broadcasts("compact")[0], b"\2" * 32)
    assert shorten(whole, other) == whole
    assert restore(sent, other) is None
    assert decode(lack(sent, 3), Lack).run.pool.basis == b"\1" * 32


def of_basis(data: bytes, basis: bytes) -> bytes:
    message = decode(data, Broadcast)
    pool = replace(message.run.pool, family="mixed", basis=basis)
    return encode(replace(message, run=replace(message.run, pool=pool)))


def test_the_whole_is_sent_where_it_has_fewer_bytes():
    c = [compact(RNG.uniform(-1, 1, 4096)) for _ in range(2)]  # the difference of their codes is noise
    kept, whole = (encode(Broadcast(RUN, 6, 3e-7, 5e-4, 9, 1e4, values, wire="compact")) for values in c)
    assert shorten(whole, kept) == whole
    assert restore(whole, kept) == restore(whole, None) == whole


def test_the_whole_is_sent_where_the_messages_are_not_alike():
    kept, whole = broadcasts("compact")
    other = replace(decode(kept, Broadcast), run=Run(RUN.pool, b"x" * 32))
    for message in (broadcasts("exact")[0], broadcasts("compact", pro=True)[0], encode(other)):
        assert shorten(whole, message) == whole


def test_a_client_that_lacks_the_message_before_says_so():
    kept, whole = broadcasts("compact")
    sent = shorten(whole, kept)
    for held in (None, whole, broadcasts("exact")[0]):
        assert restore(sent, held) is None
    assert decode(lack(sent, 12), Lack) == Lack(RUN, 7, 12)


def test_a_delta_of_another_pool_or_base_than_the_message_that_it_names_is_refused():
    kept, whole = broadcasts("compact")
    delta = decode(shorten(whole, kept), Delta)
    pool = replace(RUN.pool, key=RUN.pool.key ^ 1)
    for run in (Run(pool, RUN.base), Run(replace(RUN.pool, family="hashed"), RUN.base), Run(RUN.pool, bytes(32))):
        with pytest.raises(FedKSeedError, match="another family, pool, basis or base"):
            restore(encode(replace(delta, run=run)), kept)
        assert restore(encode(replace(delta, run=run)), whole) is None, "a client that has not kept it says so"


def broken(difference: bytes, **changes) -> bytes:
    return encode(replace(decode(SENT, Delta), difference=difference, **changes))


KEPT, WHOLE = broadcasts("compact")
SENT = shorten(WHOLE, KEPT)
GOOD = decode(SENT, Delta).difference
SIZE = len(KEPT) - HEADER.size - 4


def deflated(data: bytes) -> bytes:
    return zlib.compress(data, 9, -15)


@pytest.mark.parametrize(
    ("difference", "match"),
    [
        (b"\xff" * 99, "can't be inflated"),
        (b"", "must have the 4252 bytes of the message kept, and no more"),
        (GOOD[:-3], "must have the 4252 bytes"),
        (GOOD + b"\0", "must have the 4252 bytes"),
        (deflated(bytes(SIZE - 1)), "must have the 4252 bytes"),
        (deflated(bytes(SIZE + 1)), "must have the 4252 bytes"),
        (deflated(bytes(SIZE)), "does not restore the message that the server meant: the checksum differs"),
    ],
)
def test_a_difference_that_is_broken_is_refused(difference, match):
    with pytest.raises(FedKSeedError, match=match):
        restore(broken(difference), KEPT)


def test_a_difference_that_inflates_to_a_gigabyte_needs_no_more_memory_than_the_message():
    bomb = broken(deflated(bytes(1 << 30)))  # a megabyte
    tracemalloc.start()
    try:
        with pytest.raises(FedKSeedError, match="must have the 4252 bytes"):
            restore(bomb, KEPT)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# --- in a round ---------------------------------------------------------------------------------


def federation_after_a_round(name: str = "fedkseed"):
    federation = Federation(name)
    state, _ = federation.run(1)
    kept = dict(federation.messages[-1][0])
    return federation, state, kept


def test_those_who_kept_the_last_message_are_sent_the_difference_and_end_with_the_same_model():
    federation, state, kept = federation_after_a_round()
    seen = {}

    def transport(messages):
        seen.update(messages)
        whole = {client: restore(data, kept.get(client)) for client, data in messages.items()}
        return federation.transport(whole)

    some = {client: kept[client] for client in (2, 5)}
    after, report = run_round(federation.strategy, state, list(federation.clients), transport, kept=some)
    assert {client: kind_of(data) for client, data in seen.items()} == {2: Delta, 3: Broadcast, 5: Delta, 7: Broadcast}
    assert report.total_down == sum(map(len, seen.values())) < 4 * len(kept[2])
    assert report.bytes_down == len(kept[2])
    other, _ = Federation("fedkseed").run(2)
    assert after.coefficients.tobytes() == other.coefficients.tobytes()


def test_a_client_that_lost_the_last_message_is_sent_the_whole_and_both_are_counted():
    federation, state, kept = federation_after_a_round()
    asked = []

    def transport(messages):
        asked.append(dict(messages))
        held = {**kept, 5: None}
        whole = {client: restore(data, held[client]) for client, data in messages.items()}
        for client, data in whole.items():
            if data is None:
                yield client, lack(messages[client], client)
        yield from federation.transport({client: data for client, data in whole.items() if data is not None})

    after, report = run_round(federation.strategy, state, list(federation.clients), transport, kept=kept)
    assert [list(messages) for messages in asked] == [[2, 3, 5, 7], [5]]
    assert kind_of(asked[1][5]) is Broadcast
    assert report.bytes_down == len(asked[0][5]) + len(asked[1][5])
    assert report.bytes_up == 64 + 76 + 2 * 6
    other, _ = Federation("fedkseed").run(2)
    assert after.coefficients.tobytes() == other.coefficients.tobytes()


def test_a_client_that_was_not_asked_again_is_refused():
    federation, state, kept = federation_after_a_round()

    def transport(messages):
        return [(2, lack(messages[2], 2))] if kind_of(messages[2]) is Delta else [(3, b"")]

    with pytest.raises(FedKSeedError, match=r"client 3 answered, but only \[2\] were asked"):
        run_round(federation.strategy, state, [2, 3], transport, kept=kept)


def test_a_client_that_lacks_what_it_does_not_need_is_refused():
    federation, state, kept = federation_after_a_round()
    reply = encode(Lack(federation.strategy.run, 1, 2))
    for held in ({}, kept):
        with pytest.raises(FedKSeedError, match="expected a message of kind Upload, got Lack"):
            run_round(federation.strategy, state, [2], lambda messages: [(2, reply)], kept=held)
