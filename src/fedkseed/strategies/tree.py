"""FedKSeed over a tree of servers: each shard adds up its clients' uploads in integers, the root adds the shards'.

    root     broadcast ──> shards ──> clients          the same bytes for everybody
             finish <── Subtotal <── uploads           any grouping of the clients gives the same bits

A round's sum is one of integers (sums.py), and its mean is taken at the root, so the state is that of one server with
all of these clients. docs/operations.md says how shards are run.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..strategy import Strategy
from ..wire.numbers import GRID
from ..wire.records import Broadcast, Subtotal
from .checks import Arrivals
from .kseed import KSeed, RoundSum, State
from .sums import HEAVIEST, MOST, Sum
from .uploads import KSeedUpload, drawn_directions, wire_of


def tree(
    strategy: Strategy[Any], drawn: Callable[[int], Sequence[int]], members: Callable[[int], Sequence[int]]
) -> Strategy[Any]:
    """The form of FedKSeed for a server whose clients are shards: another aggregator.

    Args:
        drawn: round -> the clients of all shards that are in its cohort.
        members: shard -> its clients.
    """
    server: Any = strategy.aggregator
    return replace(strategy, aggregator=RootAggregator(server, drawn, members))


@dataclass(frozen=True, slots=True)
class RootAggregator:
    """The root's sum of subtotals."""

    replies: ClassVar[tuple[type[Subtotal], ...]] = (Subtotal,)

    server: KSeed  # makes the step with a round's sum
    drawn: Callable[[int], Sequence[int]]  # this and the next, see `tree`
    members: Callable[[int], Sequence[int]]

    def start(self, state: State, sent: Mapping[int, Any], earlier_states: Any = None) -> RoundSum:
        return self.server.start(state, sent)

    def add_(self, accumulator: RoundSum, upload: Subtotal) -> None:
        accumulator.arrivals.require(upload)
        self._require(upload, accumulator.probabilities.get(upload.round))
        accumulator.total += Sum(upload.values, upload.weight, upload.sizes, upload.counts.astype(np.int64))
        accumulator.arrivals.note_(upload)

    def finish(self, accumulator: RoundSum) -> State:
        """The state after the server's step with the sum of the subtotals: that of one server with all clients."""
        accumulator.arrivals.require_any()
        state, total = accumulator.state, accumulator.total
        if total.weight == 0:
            raise FedKSeedError(f"no client of any shard is in the sums of round {state.round + 1}: is any connected?")
        return self.server.added(state, total)

    def _require(self, subtotal: Subtotal, probabilities: NDArray[np.float32] | None) -> None:
        """Refuse a subtotal that can't be the sum of uploads of clients of its shard that were drawn.

        A shard can then do what its clients could do together, and no more.

        Args:
            probabilities: of the round's directions, from which the draws of each client follow.
        """
        settings, size = self.server.settings, self.server.settings.run.pool.size
        who, local, n = f"the subtotal of shard {subtotal.client}", settings.local, subtotal.clients.size
        drawn = self.drawn(subtotal.round)
        allowed = {*self.members(subtotal.client)}.intersection(drawn)
        if strangers := sorted({*subtotal.clients.tolist()} - allowed):
            raise FedKSeedError(
                f"{who} has clients that are not its own, or not in round {subtotal.round + 1}: {strangers[:10]}; "
                "[network] shards says which clients a shard has"
            )
        heaviest = min(HEAVIEST // max(1, len(drawn)), settings.trust.most_examples or HEAVIEST)
        if subtotal.weight > heaviest * n:
            raise FedKSeedError(f"{who} weighs {subtotal.weight}, its {n} clients {heaviest} each at most")
        times, most = np.zeros(size, np.int64), np.zeros(size, np.int64)  # draws of a direction: by all of them, by one
        for client in subtotal.clients.tolist():
            draws = drawn_directions(settings, subtotal.round, client, local.scalars, probabilities)
            own = np.bincount(draws, minlength=size)
            times, most = times + own, np.maximum(most, own)
        if (over := np.flatnonzero(subtotal.counts > times)).size:
            counted, j = int(subtotal.counts[over[0]]), int(over[0])
            raise FedKSeedError(
                f"{who} has {counted} scalars along direction {j}, and its {n} clients have drawn it {times[j]} times"
            )
        clip = min(local.clip * (1 + 1e-6), MOST * GRID)  # a clip is rounded on its way
        largest = 1.0 if wire_of(settings) == "sign" else clip
        if np.any(subtotal.sizes * GRID > subtotal.counts * largest):
            raise FedKSeedError(f"{who} has scalars above what a client may report, {local.clip:g}")
        # Where clients send scalars alone, a sum is no larger than its scalars; derivatives bring no sizes.
        sizes = heaviest * subtotal.sizes.astype(np.float64)
        if settings.derivatives is not None:
            most, sizes, largest = np.full(size, local.scalars), np.full(size, np.inf), clip * (1 + 1e-3)  # 8 bits
        bounds = np.minimum(sizes, subtotal.weight * np.minimum(most * largest, MOST * GRID) / GRID)
        if np.any(np.abs(subtotal.values.astype(np.float64)) > bounds):  # abs in float: that of -2^63
            raise FedKSeedError(f"{who} has a sum beyond what its clients may report along one direction")


@dataclass(slots=True)
class ShardSum:
    """The uploads of a shard's clients so far."""

    sum: RoundSum
    losses: list[float] = field(default_factory=list)
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class ShardAggregator:
    """A shard's sum of its clients' uploads, which it hands up."""

    server: KSeed

    def start(self, message: Broadcast, asked: Collection[int]) -> ShardSum:
        """No uploads yet.

        Args:
            message: the round's broadcast.
            asked: the clients of the whole round; no weight is above the share of each of what integers hold.
        """
        run, size, zeros = self.server.settings.run, self.server.settings.run.pool.size, np.zeros(0, np.int64)
        state = State(message.round, message.coefficients.astype(np.float64), zeros, zeros)
        arrivals = Arrivals(run, message.round, frozenset(asked))
        return ShardSum(RoundSum(state, arrivals, {message.round: message.probabilities}, Sum.of([], size)))

    def add_(self, accumulator: ShardSum, upload: KSeedUpload) -> None:
        """Add a client's upload; those that one server for all refuses are refused here."""
        self.server.add_(accumulator.sum, upload)
        accumulator.skipped += upload.skipped
        if math.isfinite(upload.loss):
            accumulator.losses.append(upload.loss)

    def finish(self, accumulator: ShardSum, shard: int) -> Subtotal:
        """The sum for the server above; of none, if none of the shard's clients was drawn.

        Args:
            shard: the shard's number as a client of that server.
        """
        uploads, settings = accumulator.sum, self.server.settings
        waiting = uploads.in_order(HEAVIEST // len(uploads.arrivals.clients))
        total = uploads.total + Sum.of(waiting, settings.run.pool.size)
        clients = np.array(sorted(client for client, _ in uploads.arrivals.came), np.uint32)
        loss = median(accumulator.losses) if accumulator.losses else math.nan
        skipped = min(accumulator.skipped, (1 << 32) - 1)  # a client may claim any number
        about, counts = (settings.run, uploads.state.round, shard, clients), total.counts.astype(np.uint32)
        return Subtotal(*about, total.weight, loss, skipped, total.values, total.sizes, counts)
