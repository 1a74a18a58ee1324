"""Checks and sums that the servers of all algorithms share."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..randomness import draw_directions
from ..wire.numbers import GRID
from ..wire.records import Change, Run, Subtotal, Upload
from .sums import HEAVIEST, Contribution, Sum, require_summable

NONE = np.empty(0, np.uint32)
NEVER: Mapping[int, Any] = MappingProxyType({})  # no client began earlier
Reply = TypeVar("Reply", bound=Upload | Change | Subtotal)


def in_order(uploads: Sequence[Reply], run: Run, round_: int, max_staleness: int = 0) -> list[Reply]:
    """Uploads in the order of their clients' numbers and rounds, so that float sums have one value.

    Args:
        max_staleness: the largest number of rounds since a client began; 0 where rounds are synchronous.

    Raises:
        FedKSeedError: there is no upload, or one is of another round or run, or came twice.
    """
    if not uploads:
        raise FedKSeedError(f"round {round_} got no upload; it can't be aggregated")
    ordered = sorted(uploads, key=lambda upload: (upload.client, upload.round))
    for number, upload in enumerate(ordered):
        run.require(upload.run)
        if not 0 <= round_ - upload.round <= max_staleness:
            raise FedKSeedError(
                f"client {upload.client} answered round {upload.round}, the server is in round {round_}"
                + (f" and takes answers that are at most {max_staleness} rounds old" if max_staleness else "")
            )
        if number and (ordered[number - 1].client, ordered[number - 1].round) == (upload.client, upload.round):
            raise FedKSeedError(f"client {upload.client} answered round {upload.round} twice; keep one of its uploads")
    return ordered


def require_scalars(upload: Upload, asked: int, clip: float, wire: str = "exact") -> None:
    """Refuse scalars of another count than was asked for, of another precision, or above the clip."""
    if upload.scalars.size != asked:
        raise FedKSeedError(f"client {upload.client} reports {upload.scalars.size} scalars, {asked} were asked for")
    if upload.wire != wire:
        raise FedKSeedError(
            f"client {upload.client} sends scalars {upload.wire!r}, here they travel {wire!r}; use the same recipe"
        )
    require_clipped(upload.client, upload.scalars, clip)


def require_clipped(client: int, scalars: NDArray[np.float32], clip: float) -> None:
    """Refuse scalars above the clip."""
    largest = float(np.nan_to_num(abs(scalars)).max(initial=0))
    if largest > clip * (1 + 1e-7):  # a clip is rounded to float32 on its way
        raise FedKSeedError(f"client {client} reports a scalar gradient of {largest:g}, at most {clip:g} is allowed")


def require_size(upload: Change, size: int) -> None:
    """Refuse an upload that has not exactly one number a coefficient or a weight."""
    if upload.values.size != size or upload.counts.size:
        raise FedKSeedError(f"client {upload.client} sent {upload.values.size} numbers, the model has {size}")


def require_change(upload: Change, most: float) -> None:
    """Refuse a change that moves a coefficient further than `most`."""
    largest = float(abs(upload.values).max(initial=0))
    if largest > most * (1 + 1e-3):  # 8 bits round
        raise FedKSeedError(f"client {upload.client} moves a coefficient by {largest:g}, at most {most:g} is allowed")


def require_sendable(round_: int, numbers: NDArray) -> None:
    """Refuse a state whose numbers the next broadcast could not carry."""
    if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
        raise FedKSeedError(f"round {round_} would overflow float32; set a clip on scalars, or a smaller lr")


def merged(uploads: Sequence[Upload], run: Run, lr: float) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The sums −η Σ_i (n_i / n) Σ ρ of every drawn direction, ascending; all directions were equally likely.

    Raises:
        FedKSeedError: integers can't hold a sum (sums.py), or the next broadcast can't carry it.
    """
    most = HEAVIEST // len(uploads)  # no claim of one client must make the sum of all too large for integers
    taken = [
        Contribution.of_scalars(u.client, min(u.examples, most), drawn_by(u, run, None), u.scalars[u.found])
        for u in uploads
    ]
    require_summable(taken)
    directions, places = np.unique(np.concatenate([one.directions for one in taken]), return_inverse=True)
    values, start = np.zeros(directions.size, np.int64), 0
    for one in taken:
        values[places[start : start + one.directions.size]] += one.weight * one.values
        start += one.directions.size
    sums = -Sum(values, sum(one.weight for one in taken)).mean(lr * GRID)
    require_sendable(uploads[0].round, sums)
    return directions.astype(np.uint32), sums.astype(np.float32)


def drawn_by(
    upload: Upload, run: Run, probabilities: NDArray[np.float32] | None, drawer: int | None = None
) -> NDArray[np.uint32]:
    """The directions along which a client's scalar is not NaN, as drawn and in the order of its steps.

    Args:
        drawer: the number by which they were drawn; None: the client's.
    """
    pool, drawer = run.pool, upload.client if drawer is None else drawer
    asked = draw_directions(pool.key, upload.round, drawer, upload.scalars.size, pool.size, probabilities)
    return asked[upload.found]
