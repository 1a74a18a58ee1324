"""Keys, seeds and masks, and the circle of neighbours."""

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import shamir

from fedkseed import FedKSeedError
from fedkseed.secure.masks import derived, mask, opened, sealed, share

from .rounds import members_of, roster_of


def chacha20(key: np.ndarray, block: int) -> np.ndarray:
    """One block of RFC 8439, section 2.3, with a nonce of zeros."""
    first = np.array([*np.frombuffer(b"expand 32-byte k", "<u4"), *key, block, 0, 0, 0], np.uint32)
    x = first.copy()

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for to, of, into, by in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)]:
            x[to : to + 1] += x[of]  # of an array: wraps around in silence
            x[into] ^= x[to]
            x[into] = x[into] << np.uint32(by) | x[into] >> np.uint32(32 - by)

    for _ in range(10):
        for k in range(4):
            quarter(k, k + 4, k + 8, k + 12)
        for k in range(4):
            quarter(k, (k + 1) % 4 + 4, (k + 2) % 4 + 8, (k + 3) % 4 + 12)
    return x + first


def test_a_mask_is_the_stream_of_its_seed():
    """Specified in docs/privacy.md: another program makes the same numbers."""
    key = np.frombuffer(hashlib.sha256(b"fedkseed mask\n" + bytes(16)).digest(), "<u4")
    expected = np.concatenate([chacha20(key, block) for block in range(3)])
    assert np.array_equal(mask(bytes(16), 40, 32), expected[:40])
    assert np.array_equal(mask(bytes(16), 40, 12), expected[:40] % 4096)
    assert not np.array_equal(mask(bytes(16), 64, 12), mask(bytes(15) + b"1", 64, 12))


def test_labels_give_secrets_of_their_own():
    secrets = {derived(b"s", b"c", *label) for label in [("pair", 1, 2), ("pair", 2, 1), ("bundle", 1, 2), ("own",)]}
    assert len(secrets) == 4
    assert len(derived(b"s", b"c", "own", size=16)) == 16


def test_a_changed_bundle_is_not_opened():
    data = sealed(bytes(32), b"shares")
    assert opened(bytes(32), data) == b"shares"
    for wrong in (data[:-1] + bytes([data[-1] ^ 1]), b""):
        with pytest.raises(FedKSeedError, match="can't be opened"):
            opened(bytes(32), wrong)


def test_a_share_is_a_value_of_the_polynomial_through_others():
    """Against the library's own shares: from any three of five, each of the others and the secret follow."""
    parts = {part[-1]: bytes(part[:-1]) for part in shamir.split(b"sixteen bytes...", 5, 3)}
    for points in combinations(parts.items(), 3):
        assert share(dict(points), 0) == b"sixteen bytes..."
        assert all(share(dict(points), x) == values for x, values in parts.items() if x not in dict(points))
    with pytest.raises(FedKSeedError, match="can't be put together"):
        share({1: b"a", 2: b"bc"}, 0)


def test_two_thirds_of_the_holders_need_not_be_sent_their_shares():
    roster = roster_of(members_of(range(10)))
    assert [len(roster.sealed_for(place)) for place in range(10)] == [4] * 10
    held = Counter(holder for place in range(10) for holder in roster.sealed_for(place))
    assert set(held.values()) == {4}, "each is sent as many"
    assert all(place == roster.holders(place)[0] for place in range(10))


@pytest.mark.parametrize(("count", "neighbours"), [(3, None), (21, None), (60, None), (60, 30), (7, 4)])
def test_neighbours_are_mutual_and_as_many_as_asked(count, neighbours):
    roster = roster_of(members_of(range(count)), neighbours=neighbours)
    others = [roster.others(place) for place in range(count)]
    assert {len(of) for of in others} == {min(count - 1, neighbours or 20)}
    assert all(place in others[other] for place in range(count) for other in others[place])
    holders = len(others[0]) + 1
    assert 3 * roster.threshold > 2 * holders >= 3 * (roster.threshold - 1)


def test_neighbours_change_with_the_round():
    roster = roster_of(members_of(range(40)), neighbours=6)
    assert roster.others(0) != replace(roster, round=4).others(0)


def test_rounds_that_protect_nobody_are_refused():
    with pytest.raises(FedKSeedError, match="an even number"):
        roster_of(members_of(range(9)), neighbours=3).require()
    with pytest.raises(FedKSeedError, match="at most 255 holders"):
        roster_of(members_of(range(300)), neighbours=280).require()
    roster_of(members_of(range(4)), neighbours=None).require()
