"""The server's side of secure aggregation: it asks for shares, and takes the masks off the sum of a round."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..wire.records import Masked, Run, Shares, Survivors
from .masks import SEED, TAG, MaskRoster, mask, share, signed
from .member import sent_to


def requests(run: Run, roster: MaskRoster, uploads: Sequence[Masked], width: int, size: int) -> dict[int, Survivors]:
    """The message to each client whose masked upload has come: who is there, and the bundles made for it.

    Args:
        width, size: bits of a masked number, and how many an upload has.

    Raises:
        FedKSeedError: too few uploads have come, or one has another form than the round's.
    """
    there = np.zeros(roster.members.size, np.bool_)
    bundles: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for upload in uploads:
        place = require_upload(roster, upload, width, size)
        if there[place]:
            raise FedKSeedError(f"client {upload.client} has answered twice")
        there[place] = True
        bundles |= {(place, holder): row for holder, row in zip(roster.sealed_for(place), upload.bundles, strict=True)}
    survivors = np.flatnonzero(there).tolist()
    roster.require_readable(survivors, survivors)

    def request(place: int) -> Survivors:
        rows = [bundles[sender, place] for sender in sent_to(roster, place, survivors)]
        length = len(roster.holders(place)) * SEED + TAG
        sent = np.array(rows, np.uint8).reshape(-1, length)
        return Survivors(run, roster.round, roster.members, roster.keys, roster.broadcast, there, sent)

    return {int(roster.members[place]): request(place) for place in survivors}


def require_upload(roster: MaskRoster, upload: Masked, width: int, size: int) -> int:
    """The place of an upload's client; one that is not in the round, or an upload of another form, is refused."""
    (place,) = np.flatnonzero(roster.members == upload.client).tolist() or (None,)
    if place is None:
        raise FedKSeedError(f"client {upload.client} is not in this round")
    shape = len(roster.sealed_for(place)), len(roster.holders(place)) * SEED + TAG
    if (upload.width, upload.numbers.size, upload.bundles.shape) != (width, size, shape):
        raise FedKSeedError(
            f"client {upload.client} sent {upload.numbers.size} numbers of {upload.width} bits and bundles of "
            f"{upload.bundles.shape}; asked were {size} of {width} and {shape}: use the same recipe"
        )
    return place


def require_shares(roster: MaskRoster, answer: Shares, came: NDArray[np.bool_]) -> dict[int, tuple[int, bytes]]:
    """Whose secrets a client's answer gives shares of: place -> their point and values, as many as were asked for."""
    (holder,) = np.flatnonzero(roster.members == answer.client).tolist() or (None,)
    if holder is None or not came[holder]:
        raise FedKSeedError(f"client {answer.client} sent shares, and was not asked for any")
    shares, start = dict[int, tuple[int, bytes]](), 0
    for sender in (sender for sender in roster.holders(holder) if came[sender]):
        stop = start + (1 + sum(not came[other] for other in roster.others(sender))) * SEED
        shares[sender] = 1 + roster.holders(sender).index(holder), answer.data[start:stop]
        start = stop
    if len(answer.data) != start:
        raise FedKSeedError(f"client {answer.client} sent {len(answer.data)} bytes of shares, {start} were asked for")
    return shares


def unmasked(roster: MaskRoster, uploads: list[Masked], shares: Mapping[int, Shares], width: int) -> NDArray[np.int64]:
    """The sum of the whole numbers of those whose uploads have come, shape (m,).

    Args:
        shares: by client; more than two thirds of the holders of each secret are enough.

    Raises:
        FedKSeedError: shares are missing, or have another length than was asked for.
    """
    there = np.isin(roster.members, [upload.client for upload in uploads])
    points = defaultdict[int, dict[int, bytes]](dict)
    for _, answer in sorted(shares.items()):
        for sender, (point, values) in require_shares(roster, answer, there).items():
            points[sender][point] = values
    total, size = np.zeros(uploads[0].numbers.size, np.int64), uploads[0].numbers.size
    for upload in uploads:
        (place,) = np.flatnonzero(roster.members == upload.client).tolist()
        if len(points[place]) < roster.threshold:
            raise FedKSeedError(
                f"round {roster.round}: {len(points[place])} clients gave shares of client {upload.client}'s masks, "
                f"{roster.threshold} are needed; nothing of the round can be read"
            )
        secret = share(dict([*points[place].items()][: roster.threshold]), 0)
        missing = [other for other in roster.others(place) if not there[other]]
        total += upload.numbers.astype(np.int64) - mask(secret[:SEED], size, width)
        for k, other in enumerate(missing, 1):
            seed = secret[k * SEED : (k + 1) * SEED]
            total -= signed(place, other) * mask(seed, size, width).astype(np.int64)
    half = 1 << width - 1
    return (total + half & ((1 << width) - 1)) - half
