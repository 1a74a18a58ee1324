"""The sum of a round with masks: exactly that of the clear numbers of those who are there, or nothing."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedkseed import FedKSeedError
from fedkseed.secure.grid import Grid
from fedkseed.secure.masks import SEED, derived, mask
from fedkseed.secure.server import requests

from .attacks import lied_to, sum_of
from .rounds import RUN, SIZE, WIDTH, begun, first_leg, members_of, roster_of, second_leg, total

NUMBERS = (2, 3, 5, 8, 13, 21, 34)


def clear(numbers, there) -> np.ndarray:
    return np.sum([numbers[n] for n in there], axis=0)


@pytest.mark.parametrize(
    ("gone", "silent"), [((), ()), ((), (3,)), ((), (2, 34)), ((2,), ()), ((34,), (21,)), ((5,), (3,)), ((5, 8), ())]
)
def test_the_sum_of_those_who_are_there_is_exact(gone, silent):
    members, roster, numbers, uploads = begun(NUMBERS, gone)
    shares = second_leg(members, roster, uploads, silent)
    assert np.array_equal(total(roster, uploads, shares), clear(numbers, {*NUMBERS} - {*gone}))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_dropouts_leave_the_sum_or_an_error(data):
    count = data.draw(st.integers(3, 12))
    neighbours = data.draw(st.sampled_from([None, 2, 4, 6]))
    gone = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    silent = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    members, roster, numbers, uploads = begun(range(count), gone, neighbours)
    there = {one.client for one in uploads}
    answering = there - silent
    enough = len(there) >= roster.enough and all(
        len(answering.intersection(roster.holders(place))) >= roster.threshold for place in there
    )
    if not enough:
        with pytest.raises(FedKSeedError, match="nothing of"):
            total(roster, uploads, second_leg(members, roster, uploads, silent))
        return
    shares = second_leg(members, roster, uploads, silent)
    assert np.array_equal(total(roster, uploads, shares), clear(numbers, there))


def test_too_few_uploads_reveal_nothing():
    members, roster, _, uploads = begun(NUMBERS, gone=(2, 3, 5))
    with pytest.raises(FedKSeedError, match="4 of 7 masked uploads have come, a sum is made from 5 on"):
        second_leg(members, roster, uploads)


def test_the_order_of_uploads_and_shares_does_not_matter():
    members, roster, _, uploads = begun(NUMBERS, gone=(8,))
    shares = second_leg(members, roster, uploads)
    assert np.array_equal(total(roster, uploads[::-1], shares[::-1]), total(roster, uploads, shares))


def test_masked_numbers_are_uniform():
    """Numbers as uneven as can be: all 127. A mask that is short of anything shows in the 2^WIDTH values."""
    found = []
    for seed in range(40):
        members = members_of(NUMBERS, seed)
        uploads = first_leg(members, roster_of(members), dict.fromkeys(NUMBERS, np.full(SIZE, 127)))
        found += [one.numbers for one in uploads]
    counts = np.bincount(np.concatenate(found) >> (WIDTH - 6), minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-3
    low = np.bincount(np.concatenate(found) & 63, minlength=64)
    assert stats.chisquare(low).pvalue > 1e-3


def test_without_their_own_masks_the_sum_of_any_part_is_uniform_and_that_of_all_is_not():
    """Own masks are known to the server after a round: what protects a client then are the masks of pairs."""
    few = NUMBERS[:4]
    sums = {size: [] for size in range(1, 5)}
    for seed in range(60):
        members = members_of(few, seed)
        roster = roster_of(members)
        uploads = first_leg(members, roster, dict.fromkeys(few, np.full(SIZE, 100)))
        bare = bare_of_own_masks(members, roster, uploads)
        for size in sums:
            sums[size] += [np.sum([bare[n] for n in part], axis=0) % (1 << WIDTH) for part in combinations(few, size)]
    for size in (1, 2, 3):
        counts = np.bincount(np.concatenate(sums[size]) >> (WIDTH - 5), minlength=32)
        assert stats.chisquare(counts).pvalue > 1e-4, size
    assert set(np.concatenate(sums[4]).tolist()) == {400}


def bare_of_own_masks(members, roster, uploads):
    return {
        one.client: one.numbers.astype(np.int64)
        - mask(derived(members[one.client].private, roster.context, "own", size=SEED), SIZE, WIDTH)
        for one in uploads
    }


def test_a_wrong_share_gives_another_sum_that_no_grid_has():
    members, roster, numbers, uploads = begun(NUMBERS)
    shares = second_leg(members, roster, uploads)
    wrong = replace(shares[0], data=bytes([shares[0].data[0] ^ 1]) + shares[0].data[1:])
    found = total(roster, uploads, [wrong, *shares[1:]])
    assert not np.array_equal(found, clear(numbers, NUMBERS))
    grid = Grid(1.0, 8, SIZE, 5)
    grid.require_plausible(total(roster, uploads, shares), len(NUMBERS))
    with pytest.raises(FedKSeedError, match="a wrong share or numbers beyond the grid"):
        grid.require_plausible(found, len(NUMBERS))


def test_uploads_and_shares_of_another_form_are_refused():
    members, roster, _, uploads = begun(NUMBERS)
    shares = second_leg(members, roster, uploads)
    for wrong, reason in [
        (replace(uploads[0], width=WIDTH + 1), "numbers of 15 bits"),
        (replace(uploads[0], numbers=uploads[0].numbers[:-1]), "sent 63 numbers"),
        (replace(uploads[0], bundles=uploads[0].bundles[:-1]), "asked were"),
        (replace(uploads[0], client=99), "not in this round"),
        (replace(uploads[0], client=3), "answered twice"),
    ]:
        with pytest.raises(FedKSeedError, match=reason):
            requests(RUN, roster, [*uploads[1:], wrong], WIDTH, SIZE)
    for data in (shares[0].data[:-1], shares[0].data + b"x", b""):
        with pytest.raises(FedKSeedError, match="bytes of shares"):
            total(roster, uploads, [replace(shares[0], data=data), *shares[1:]])
    with pytest.raises(FedKSeedError, match="was not asked"):
        total(roster, uploads, [replace(shares[0], client=99), *shares[1:]])


def test_no_client_in_the_midst_of_its_neighbours_can_be_read_by_lies():
    """Each of six neighbours hears that the five others are gone: few of 16 clients, and most of its own."""
    numbers = range(16)
    members, roster, _, uploads = begun(numbers, neighbours=6)
    victim = 3
    around = roster.others(victim)
    views = {victim: [], **{one: [other for other in around if other != one] for one in around}}
    assert len(numbers) - 5 >= roster.enough, "each view has clients enough"
    with pytest.raises(FedKSeedError, match=r"2 holders of client .* are there, 5 are needed; nothing of the round"):
        lied_to(members, roster, uploads, views)
    few = {place: gone[:2] for place, gone in views.items()}
    assert sum_of([victim], roster, uploads, few, lied_to(members_of(numbers), roster, uploads, few)) is None


def test_lies_give_the_sum_of_more_than_half_and_of_no_fewer():
    """Six of ten: each client hears that three others are gone, of a pool of four (docs/privacy.md)."""
    numbers = range(10)
    members, roster, clear_numbers, uploads = begun(numbers)
    left_out = {0, 1, 2, 3}
    views = {place: sorted(left_out - {place})[:3] for place in left_out}
    views |= {place: sorted(left_out - {place % 4}) for place in range(4, 10)}
    given = lied_to(members, roster, uploads, views)
    part = sorted({*numbers} - left_out)
    expected = np.sum([clear_numbers[n] for n in part], axis=0) % (1 << WIDTH)
    assert np.array_equal(sum_of(part, roster, uploads, views, given), expected)
    assert sum_of(part[1:], roster, uploads, views, given) is None
    assert all(sum_of([one], roster, uploads, views, given) is None for one in numbers)
