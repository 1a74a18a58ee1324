"""Checks that the servers of all algorithms share, and the accumulator of those that need all uploads of a round."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DivergedError, FedKSeedError
from ..randomness import draw_directions
from ..wire.numbers import GRID
from ..wire.records import Change, Run, Upload
from .sums import HEAVIEST, Contribution


@dataclass(slots=True)
class Arrivals:
    """The clients that have sent an upload in a round so far."""

    run: Run
    round: int  # of the server
    clients: frozenset[int]  # that may send one
    max_staleness: int = 0  # the largest number of rounds since a client began; 0 where rounds are synchronous
    came: set[tuple[int, int]] = field(default_factory=set)  # (client, round in which it began)

    @classmethod
    def of(cls, run: Run, state: Any, sent: Iterable[int], max_staleness: int = 0) -> "Arrivals":
        """Those of the round after a state, of which none has come."""
        return cls(run, state.round, frozenset(sent), max_staleness)

    def require(self, upload: Any) -> None:
        """Refuse an upload that is of another run or round, or that is one too many."""
        self.run.require(upload.run)
        if not 0 <= self.round - upload.round <= self.max_staleness:
            raise FedKSeedError(
                f"client {upload.client} answered round {upload.round}, the server is in round {self.round}"
                + (f" and takes answers that are at most {self.max_staleness} rounds old" if self.max_staleness else "")
            )
        if (upload.client, upload.round) in self.came:
            raise FedKSeedError(f"client {upload.client} answered round {upload.round} twice; keep one of its uploads")
        if upload.client not in self.clients:
            raise FedKSeedError(f"client {upload.client} is none of the {len(self.clients)} clients of this round")

    def note_(self, upload: Any) -> None:
        """Note an upload that was added."""
        self.came.add((upload.client, upload.round))

    def require_any(self) -> None:
        """Refuse to finish a round without an upload."""
        if not self.came:
            raise FedKSeedError(f"round {self.round} got no upload; it can't be aggregated")


@dataclass(slots=True)
class KeptUploads:
    """The accumulator of a server that adds up floating-point numbers: their sum has one value only in one order."""

    state: Any
    arrivals: Arrivals
    uploads: dict[int, Any] = field(default_factory=dict)

    def keep_(self, upload: Any) -> None:
        """Keep an upload that was checked."""
        self.arrivals.note_(upload)
        self.uploads[upload.client] = upload

    def in_order(self) -> list[Any]:
        """The uploads in the order of their clients' numbers; none is an error."""
        self.arrivals.require_any()
        return [self.uploads[client] for client in sorted(self.uploads)]


def require_scalars(upload: Upload, asked: int, clip: float, wire: str = "exact") -> None:
    """Refuse scalars of another count than was asked for, of another precision, or above the clip."""
    if upload.scalars.size != asked:
        raise FedKSeedError(f"client {upload.client} reports {upload.scalars.size} scalars, {asked} were asked for")
    if upload.wire != wire:
        raise FedKSeedError(f"client {upload.client} sends scalars {upload.wire!r}, not {wire!r}; use the same recipe")
    require_clipped(upload.client, upload.scalars, clip)


def require_clipped(client: int, scalars: NDArray[np.float32], clip: float) -> None:
    """Refuse scalars above the clip."""
    largest = float(np.nan_to_num(abs(scalars)).max(initial=0))
    if largest > clip * (1 + 1e-7):  # a clip is rounded to float32 on its way
        raise FedKSeedError(f"client {client} reports a scalar gradient of {largest:g}, at most {clip:g} is allowed")


def require_size(upload: Change, size: int) -> None:
    """Refuse an upload of another number of values than was asked for, or one that counts them by tensor."""
    if upload.values.size != size or upload.counts.size:
        by_tensor = f", counted for {upload.counts.size} tensors," if upload.counts.size else ""
        raise FedKSeedError(
            f"client {upload.client} sent {upload.values.size} numbers{by_tensor}, {size} were asked for"
        )


def require_sendable(round_: int, numbers: NDArray) -> None:
    """Refuse a state whose numbers the next broadcast could not carry."""
    largest = max(numbers.max(initial=0), -numbers.min(initial=0))  # no copy: these can be all weights
    if not largest <= np.finfo(np.float32).max:
        raise DivergedError(f"round {round_} would overflow float32; set a clip on scalars, or a smaller lr")


def merged(uploads: Sequence[Upload], run: Run, lr: float) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The sums −η Σ_i (n_i / n) Σ ρ of every drawn direction, ascending; all directions were equally likely."""
    most = HEAVIEST // len(uploads)  # no claim of one client must make the sum of all too large for integers
    contributions = []
    for upload in uploads:
        drawn = draw_directions(run.pool.key, upload.round, upload.client, upload.scalars.size, run.pool.size, None)
        along, scalars, weight = drawn[upload.found], upload.scalars[upload.found], min(upload.examples, most)
        contributions.append(Contribution.of_scalars(upload.client, weight, along, scalars))
    directions, places = np.unique(np.concatenate([each.directions for each in contributions]), return_inverse=True)
    total = np.zeros(directions.size, np.int64)
    np.add.at(total, places, np.concatenate([each.weight * each.values for each in contributions]))
    sums = -(total.astype(np.float64) / sum(each.weight for each in contributions) * (lr * GRID))
    require_sendable(uploads[0].round, sums)
    return directions.astype(np.uint32), sums.astype(np.float32)
