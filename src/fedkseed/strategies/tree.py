"""FedKSeed over a tree of servers: each shard adds up its clients' uploads in integers, the root adds the shards'.

    root     broadcast ──> shards ──> clients          the same bytes for everybody
             aggregate <── Subtotal <── uploads        any grouping of the clients gives the same bits

A round's sum is one of integers (sums.py), and its mean is taken at the root, so the state is that of one server with
all of these clients. docs/scaling.md says how shards are run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import FedKSeedError
from ..local.client import Client
from ..local.work import LocalWork
from ..strategy import COEFFICIENTS
from ..wire.numbers import GRID
from ..wire.records import Broadcast, Run, Subtotal
from .checks import NEVER, in_order
from .kseed import KSeed, State
from .sums import HEAVIEST, MOST, Sum

if TYPE_CHECKING:
    from ..weights.base import Pooled


@dataclass(frozen=True, slots=True)
class Tree:
    """The root's side of a tree: an algorithm whose uploads come as subtotals.

    Args:
        inner: makes broadcasts, the clients' local steps and the server's step.
        drawn: round -> the clients of all shards that are in its cohort.
        members: shard -> its clients.
    """

    message: ClassVar[type[Broadcast]] = Broadcast
    state: ClassVar[type[State]] = State
    weights: ClassVar[str] = COEFFICIENTS
    remembers: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = KSeed.reads
    replies: ClassVar[tuple[type[Subtotal]]] = (Subtotal,)
    sized: ClassVar[bool] = False  # a subtotal names its clients

    inner: KSeed
    drawn: Callable[[int], Sequence[int]]
    members: Callable[[int], Sequence[int]]

    @property
    def run(self) -> Run:
        return self.inner.run

    def work(self, differentiates: bool) -> LocalWork:
        return self.inner.work(differentiates)

    def init(self) -> State:
        return self.inner.init()

    def broadcast(self, state: State, cohort: Sequence[int]) -> dict[int, Broadcast]:
        return self.inner.broadcast(state, cohort)

    def sync(self, message: Broadcast, weights: "Pooled") -> None:
        self.inner.sync(message, weights)

    def train(self, message: Broadcast, client: Client[Any]) -> Any:
        return self.inner.train(message, client)

    def aggregate(self, state: State, uploads: Sequence[Subtotal], earlier: Mapping[int, State] = NEVER) -> State:
        """The state after the server's step with the sum of the subtotals: that of one server with all clients.

        Raises:
            FedKSeedError: there is no subtotal, or none with a client; or one is of another run or round, came twice,
                or is refused by `require`. The state is unchanged.
        """
        ordered, size = in_order(uploads, self.run, state.round), self.run.pool.size
        total, sizes, counts = Sum(np.zeros(size, np.int64), 0), np.zeros(size, np.int64), np.zeros(size, np.int64)
        for one in ordered:
            self.require(state, one)
            total += Sum(one.values, one.weight)
            sizes, counts = sizes + one.sizes, counts + one.counts
        if total.weight == 0:
            raise FedKSeedError(
                f"no client of any shard is in the sums of round {state.round + 1}: are they connected?"
            )
        return self.inner.added(state, total, sizes, counts)

    def require(self, state: State, one: Subtotal) -> None:
        """Refuse a subtotal that can't be the sum of uploads of clients of its shard that were drawn.

        A shard can then do what its clients could do together, and no more.

        Raises:
            FedKSeedError: it can't.
        """
        in_order([one], self.run, state.round)
        who, local, n = f"the subtotal of shard {one.client}", self.inner.local, one.clients.size
        drawn = self.drawn(state.round)
        own = {*self.members(one.client)}.intersection(drawn)
        if strangers := sorted({*one.clients.tolist()} - own):
            raise FedKSeedError(
                f"{who} has clients that are not its own, or not in round {state.round + 1}: {strangers[:10]}; "
                "[network] shards says which clients a shard has"
            )
        heaviest = min(HEAVIEST // max(1, len(drawn)), self.inner.trust.most_examples or HEAVIEST)
        if one.weight > heaviest * n:
            raise FedKSeedError(f"{who} weighs {one.weight}, its {n} clients {heaviest} each at most")
        if int(one.counts.sum(dtype=np.int64)) > local.scalars * n:
            raise FedKSeedError(f"{who} has more than the {local.scalars} scalars of each of its {n} clients")
        clip = min(local.clip * (1 + 1e-6), MOST * GRID)  # a clip is rounded on its way
        if np.any(one.sizes * GRID > one.counts * (1.0 if self.inner.wire == "sign" else clip)):
            raise FedKSeedError(f"{who} has scalars above what a client may report, {local.clip:g}")
        # Where clients send scalars alone, a sum is no larger than its scalars; derivatives bring no sizes.
        most = one.weight * min(local.scalars * clip, MOST * GRID) / GRID
        bounds = np.full(one.sizes.shape, most) if self.inner.derivatives else heaviest * one.sizes.astype(np.float64)
        if np.any(np.abs(one.values.astype(np.float64)) > np.minimum(bounds, most)):  # abs in float: that of -2^63
            raise FedKSeedError(f"{who} has a sum beyond what its clients may report along one direction")

    def example(
        self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator
    ) -> Subtotal:
        """The subtotal of one client's random upload."""
        upload = self.inner.example(round_, client, examples, differentiates, rng)
        message = self.inner.broadcast(replace(self.inner.init(), round=round_), [client])[client]
        return self.inner.subtotal(message, client, [upload], len(self.drawn(round_)))
