"""The chain: a digest of everything that a round holds, and of all rounds before it."""

from hashlib import sha256
from itertools import combinations

from fedkseed.run import chain
from fedkseed.run.chain import Receipt

STATE, REPORT = b"state", '{"round": 0}'
RECEIPTS = {1: Receipt(b"one", b"signed"), 2: Receipt(b"two")}


def test_a_tiny_chain_has_the_digests_that_the_definition_gives():
    """Written out with SHA-256 alone: a change here makes each kept run and each client's history foreign."""
    begin = b"fedkseed, version 2: the rounds of a run\n"
    before = sha256(b"0").digest() + sha256().digest() + sha256().digest()
    receipts = b"".join(
        number.to_bytes(4, "little") + sha256(upload).digest() + sha256(signature).digest()
        for number, upload, signature in ((1, b"one", b"signed"), (2, b"two", b""))
    )
    after = sha256(STATE).digest() + sha256(REPORT.encode()).digest() + sha256(receipts).digest()
    first = sha256(begin + sha256(before).digest()).digest()
    second = sha256(first + sha256(after).digest()).digest()

    assert chain.parts(b"0", None, {}) == before
    assert chain.parts(STATE, REPORT, RECEIPTS) == after
    assert chain.head(None, chain.link(before)) == first
    assert chain.head(first, chain.link(after)) == second
    assert second.hex() == "bf50bc548bc61d362c9e34e0689390f8bd28ac50b5a5ce3387143422c00c91ff"


def test_a_round_has_other_parts_when_anything_of_it_is_another():
    made = [
        chain.parts(STATE, REPORT, RECEIPTS),
        chain.parts(b"State", REPORT, RECEIPTS),
        chain.parts(STATE, '{"round": 1}', RECEIPTS),
        chain.parts(STATE, None, RECEIPTS),
        chain.parts(STATE, REPORT, {}),
        chain.parts(STATE, REPORT, {1: RECEIPTS[1]}),
        chain.parts(STATE, REPORT, {1: RECEIPTS[2], 2: RECEIPTS[1]}),
        chain.parts(STATE, REPORT, {1: RECEIPTS[1], 3: RECEIPTS[2]}),
        chain.parts(STATE, REPORT, {1: Receipt(b"one"), 2: RECEIPTS[2]}),
        chain.parts(STATE, REPORT, {1: Receipt(b"signed", b"one"), 2: RECEIPTS[2]}),
        chain.parts(STATE, REPORT, {1: Receipt(b"ones", b"igned"), 2: RECEIPTS[2]}),  # a byte moved to its neighbour
    ]
    assert all(a != b for a, b in combinations(made, 2))
    assert {len(parts) for parts in made} == {3 * chain.SIZE}


def test_the_order_in_which_uploads_came_makes_no_difference():
    assert chain.parts(STATE, REPORT, dict(reversed(RECEIPTS.items()))) == chain.parts(STATE, REPORT, RECEIPTS)


def test_a_head_stands_for_all_links_before_it_and_their_order():
    links = [bytes([number]) * 32 for number in range(3)]

    def head_of(*numbers: int) -> bytes | None:
        made = None
        for number in numbers:
            made = chain.head(made, links[number])
        return made

    heads = [head_of(*numbers) for numbers in ((0,), (0, 1), (0, 2), (1, 0), (0, 1, 2), (0, 2, 1), (0, 0), (1,))]
    assert all(a != b for a, b in combinations(heads, 2))
    assert chain.head(chain.BEGIN, links[0]) == chain.head(None, links[0]), "the first head is of the beginning's text"
