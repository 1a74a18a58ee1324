"""A server that names other survivors to each client of a round, for tests."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedkseed.secure.masks import SEED, MaskRoster, mask, share, signed
from fedkseed.secure.member import MaskingClient, sent_to
from fedkseed.secure.server import requests
from fedkseed.wire.records import Masked

from .rounds import RUN, SIZE, WIDTH

Views = Mapping[int, Collection[int]]  # by place: the clients that it believes gone


def lied_to(
    members: Mapping[int, MaskingClient], roster: MaskRoster, uploads: Sequence[Masked], views: Views
) -> dict[int, bytes]:
    """The shares that clients give, by place, each asked with survivors of its own. All uploads have come."""
    asked, everybody, given = requests(RUN, roster, uploads, WIDTH, SIZE), range(roster.members.size), {}
    for place, gone in views.items():
        number = int(roster.members[place])
        there = [other not in gone for other in everybody]
        made = dict(zip(sent_to(roster, place, everybody), asked[number].bundles, strict=True))
        rows = [row for sender, row in made.items() if there[sender]]
        bundles = np.array(rows, np.uint8).reshape(-1, asked[number].bundles.shape[1])
        request = replace(asked[number], there=np.array(there), bundles=bundles)
        given[place] = members[number].shares(request, roster).data
    return given


def sum_of(
    part: Collection[int], roster: MaskRoster, uploads: Sequence[Masked], views: Views, given: Mapping[int, bytes]
) -> np.ndarray | None:
    """The sum of some clients' numbers modulo 2^WIDTH; None if their masks can't be found from these shares.

    Taken off are the own masks of these clients, and those that they share with others.
    """
    points = defaultdict[tuple[int, int], dict[int, bytes]](dict)  # sender, and itself or the other of a pair
    for holder, data in given.items():
        start = 0
        for sender in (sender for sender in roster.holders(holder) if sender not in views[holder]):
            for other in (sender, *(other for other in roster.others(sender) if other in views[holder])):
                points[sender, other][1 + roster.holders(sender).index(holder)] = data[start : start + SEED]
                start += SEED
    numbers = {upload.client: upload.numbers.astype(np.int64) for upload in uploads}
    total = np.zeros(SIZE, np.int64)
    for place in part:
        total += numbers[int(roster.members[place])]
        for other in (place, *(other for other in roster.others(place) if other not in part)):
            found = [*points[place, other].items()][: roster.threshold]
            if len(found) < roster.threshold:
                return None
            sign = 1 if other == place else signed(place, other)
            total -= sign * mask(share(dict(found), 0), SIZE, WIDTH).astype(np.int64)
    return total % (1 << WIDTH)
