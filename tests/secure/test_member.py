"""A client under masks gives what it should once, and never what would unmask it."""

from dataclasses import replace

import numpy as np
import pytest

from fedkseed import FedKSeedError
from fedkseed.secure.masks import SEED
from fedkseed.secure.server import requests

from .rounds import RUN, SIZE, WIDTH, begun, key_of, members_of, numbers_of, roster_of, second_leg, total

NUMBERS = (1, 4, 6, 7, 9)


@pytest.fixture
def round_():
    members, roster, _, uploads = begun(NUMBERS, gone=(6,))
    return members, roster, requests(RUN, roster, uploads, WIDTH, SIZE)


def test_the_same_answers_come_from_a_process_that_has_forgotten(round_):
    members, roster, asked = round_
    again, numbers = members_of(NUMBERS), numbers_of(NUMBERS)
    for number in asked:
        first, second = (of[number].masked(RUN, roster, numbers[number], WIDTH) for of in (members, again))
        assert np.array_equal(first.numbers, second.numbers)
        assert np.array_equal(first.bundles, second.bundles)
        assert members[number].shares(asked[number], roster) == again[number].shares(asked[number], roster)


def test_both_kinds_of_shares_of_one_client_are_refused(round_):
    """First the server says that client 9 is there, then that it is not: together these would take all masks off it."""
    members, roster, asked = round_
    members[1].shares(asked[1], roster)
    without = replace(asked[1], there=np.array([True, True, True, True, False]))
    with pytest.raises(FedKSeedError, match="answered with another set of survivors"):
        members[1].shares(without, roster)
    assert members[1].shares(asked[1], roster).data, "the first set is answered again"


def test_shares_of_a_missing_client_are_of_pairs_alone(round_):
    members, roster, asked = round_
    data = members[1].shares(asked[1], roster).data
    assert len(data) == 4 * 2 * SEED, "own seed and one pair's, of each of four that are there"


def test_a_second_upload_in_a_round_is_refused(round_):
    members, roster, _ = round_
    other = numbers_of(NUMBERS)[4] + 1
    with pytest.raises(FedKSeedError, match="answered with another upload"):
        members[4].masked(RUN, roster, other, WIDTH)
    smaller = roster_of({n: members[n] for n in (1, 4, 7)})
    with pytest.raises(FedKSeedError, match="answered with another upload"):
        members[4].masked(RUN, smaller, numbers_of(NUMBERS)[4], WIDTH)
    assert members[4].masked(RUN, roster_of(members, round_=4), other, WIDTH).round == 4


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ([True, True, False, False, True], "3 of 5 masked uploads have come, a sum is made from 4 on"),
        ([False, True, True, True, True], "goes on without it"),
        ([True] * 5, "2 clients made bundles for this one, got 1"),
    ],
)
def test_requests_that_would_tell_too_much_are_refused(round_, there, reason):
    members, roster, asked = round_
    with pytest.raises(FedKSeedError, match=reason):
        members[1].shares(replace(asked[1], there=np.array(there)), roster)


def test_a_bundle_of_another_round_or_client_is_not_opened(round_):
    members, roster, asked = round_
    swapped = replace(asked[7], bundles=asked[7].bundles[::-1].copy())
    assert len(swapped.bundles) == 2
    with pytest.raises(FedKSeedError, match="can't be opened"):
        members[7].shares(swapped, roster)
    fresh, elsewhere = members_of(NUMBERS), replace(roster, broadcast=bytes(32))
    for number, request, of in ((4, asked[4], elsewhere), (9, replace(asked[9], bundles=asked[7].bundles), roster)):
        with pytest.raises(FedKSeedError, match="can't be opened"):
            fresh[number].shares(request, of)


def test_a_member_does_not_show_its_key():
    assert key_of(1).hex() not in repr(members_of([1])[1])
    assert repr(key_of(1)) not in repr(members_of([1])[1])


def test_a_key_that_is_not_its_clients_is_refused():
    members = members_of(NUMBERS, members={number: members_of([number])[number].public for number in NUMBERS})
    roster = roster_of(members)
    members[1].place(roster)
    invented = roster_of({**members, 9: members_of([9], seed=7)[9]})
    with pytest.raises(FedKSeedError, match=r"client 9 has the key .* list of members has .*: with keys of its own"):
        members[1].masked(RUN, invented, numbers_of([1])[1], WIDTH)
    with pytest.raises(FedKSeedError, match="not in this round with its own key"):
        members[9].masked(RUN, invented, numbers_of([9])[9], WIDTH)


@pytest.mark.parametrize("change", [{"round": 4}, {"broadcast": bytes(32)}, {"run": b"another"}, {"neighbours": 2}])
def test_everything_that_clients_must_agree_on_changes_the_masks(change):
    members = members_of(NUMBERS)
    roster, numbers = roster_of(members), numbers_of(NUMBERS)
    changed = replace(roster, **change)
    one = members_of([1])[1].masked(RUN, roster, numbers[1], WIDTH)
    other = members_of([1])[1].masked(RUN, changed, numbers[1], WIDTH)
    assert (one.numbers != other.numbers).mean() > 0.9


def test_a_client_that_saw_another_roster_spoils_the_round_and_is_found():
    members = members_of(NUMBERS)
    roster, numbers = roster_of(members), numbers_of(NUMBERS)
    lied_to = replace(roster, broadcast=bytes(32))
    uploads = [members[n].masked(RUN, lied_to if n == 7 else roster, numbers[n], WIDTH) for n in NUMBERS]
    with pytest.raises(FedKSeedError, match="can't be opened"):
        second_leg(members, roster, uploads)


def test_two_runs_with_the_same_keys_share_no_mask():
    members = members_of(NUMBERS)
    assert members[1].private == key_of(1)
    a, b = (replace(roster_of(members), run=name) for name in (b"a", b"b"))
    assert a.context != b.context


@pytest.mark.parametrize("neighbours", [2, 4])
def test_clients_with_few_neighbours_hold_few_shares(neighbours):
    members, roster, numbers, uploads = begun(range(9), neighbours=neighbours)
    for place in range(9):
        assert len(roster.others(place)) == neighbours
        assert all(place in roster.others(other) for other in roster.others(place))
    assert uploads[0].bundles.shape[0] == neighbours + 1 - (roster.threshold - 1)
    shares = second_leg(members, roster, uploads)
    assert np.array_equal(total(roster, uploads, shares), np.sum([*numbers.values()], axis=0))
