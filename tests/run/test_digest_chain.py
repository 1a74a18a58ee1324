"""The chain: a digest of everything that a round holds, and of all rounds before it."""

from hashlib import sha256
from itertools import combinations

from fedkseed.run import digest_chain as chain
from fedkseed.run.digest_chain import Receipt

STATE, REPORT = b"state", '{"round": 0}'
RECEIPTS = {1: Receipt(b"one", b"signed"), 2: Receipt(b"two")}
SENT = chain.digest(b"c")


def test_a_tiny_chain_has_the_digests_that_the_definition_gives():
    """Written out with SHA-256 alone: a change here makes each kept run and each client's history foreign."""
    begin = b"fedkseed, version 2: the rounds of a run\n"
    before, first_sent = sha256(b"0").digest() + sha256().digest() + sha256().digest(), sha256(b"c = 0").digest()
    receipts = b"".join(
        number.to_bytes(4, "little") + sha256(upload).digest() + sha256(signature).digest()
        for number, upload, signature in ((1, b"one", b"signed"), (2, b"two", b""))
    )
    after = sha256(STATE).digest() + sha256(REPORT.encode()).digest() + sha256(receipts).digest()
    first = sha256(begin + sha256(sha256(before).digest() + first_sent).digest()).digest()
    second = sha256(first + sha256(sha256(after).digest() + SENT).digest()).digest()

    assert chain.parts(b"0", None, {}, first_sent) == before + first_sent
    assert chain.parts(STATE, REPORT, RECEIPTS, SENT) == after + SENT
    assert chain.head(None, chain.link_of(before + first_sent)) == first
    assert chain.head(first, chain.link_of(after + SENT)) == second
    assert chain.link(chain.stem(after + SENT), SENT) == chain.link_of(after + SENT), "as a client computes it"
    assert second.hex() == "7f3059dfbea11de2bd2c460516c00ff79ce6ad69bf579d2627e7aa18db9cfa70"


def test_a_round_has_other_parts_when_anything_of_it_is_another():
    made = [
        chain.parts(STATE, REPORT, RECEIPTS, SENT),
        chain.parts(STATE, REPORT, RECEIPTS, bytes(chain.SIZE)),
        chain.parts(b"State", REPORT, RECEIPTS, SENT),
        chain.parts(STATE, '{"round": 1}', RECEIPTS, SENT),
        chain.parts(STATE, None, RECEIPTS, SENT),
        chain.parts(STATE, REPORT, {}, SENT),
        chain.parts(STATE, REPORT, {1: RECEIPTS[1]}, SENT),
        chain.parts(STATE, REPORT, {1: RECEIPTS[2], 2: RECEIPTS[1]}, SENT),
        chain.parts(STATE, REPORT, {1: RECEIPTS[1], 3: RECEIPTS[2]}, SENT),
        chain.parts(STATE, REPORT, {1: Receipt(b"one"), 2: RECEIPTS[2]}, SENT),
        chain.parts(STATE, REPORT, {1: Receipt(b"signed", b"one"), 2: RECEIPTS[2]}, SENT),
        # A byte moved to its neighbour.
        chain.parts(STATE, REPORT, {1: Receipt(b"ones", b"igned"), 2: RECEIPTS[2]}, SENT),
    ]
    assert all(a != b for a, b in combinations(made, 2))
    assert {len(parts) for parts in made} == {4 * chain.SIZE}
    assert len({chain.link_of(parts) for parts in made}) == len(made)


def test_the_order_in_which_uploads_came_makes_no_difference():
    turned = dict(reversed(RECEIPTS.items()))
    assert chain.parts(STATE, REPORT, turned, SENT) == chain.parts(STATE, REPORT, RECEIPTS, SENT)


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
