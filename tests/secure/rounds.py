"""A round with masks, leg by leg, for tests."""

import numpy as np

from fedkseed.directions import Pool
from fedkseed.secure.masks import MaskRoster
from fedkseed.secure.member import MaskingClient
from fedkseed.secure.server import requests, unmasked
from fedkseed.wire.records import Masked, Run, Shares

RUN = Run(Pool(5, 64), bytes(32))
SIZE, WIDTH = 64, 14


def key_of(number: int, seed: int = 0) -> bytes:
    return np.random.default_rng([seed, number]).bytes(32)


def members_of(numbers, seed: int = 0, **options) -> dict[int, MaskingClient]:
    return {number: MaskingClient(number, key_of(number, seed), **options) for number in numbers}


def roster_of(members: dict[int, MaskingClient], round_: int = 3, neighbours: int | None = None) -> MaskRoster:
    numbers = np.array(sorted(members), np.uint32)
    keys = np.array([[*members[number].public] for number in numbers.tolist()], np.uint8)
    return MaskRoster(b"", round_, numbers, keys, bytes(range(32)), neighbours)


def numbers_of(members, seed: int = 1) -> dict[int, np.ndarray]:
    return {n: np.random.default_rng([seed, n]).integers(-127, 128, SIZE) for n in members}


def begun(numbers, gone=(), neighbours: int | None = None):
    """The members of a round, its roster, their numbers, and the uploads of all that are not gone."""
    members, clear = members_of(numbers), numbers_of(numbers)
    roster = roster_of(members, neighbours=neighbours)
    return members, roster, clear, first_leg(members, roster, clear, gone)


def first_leg(members, roster: MaskRoster, numbers, gone=()) -> list[Masked]:
    return [members[n].masked(RUN, roster, numbers[n], WIDTH) for n in members if n not in gone]


def second_leg(members, roster: MaskRoster, uploads, silent=()) -> list[Shares]:
    asked = requests(RUN, roster, uploads, WIDTH, SIZE)
    return [members[n].shares(request, roster) for n, request in asked.items() if n not in silent]


def total(roster: MaskRoster, uploads, shares) -> np.ndarray:
    return unmasked(roster, uploads, {one.client: one for one in shares}, WIDTH)
