"""FedKSeed over a tree of servers: each shard adds up its clients' uploads in integers, the root adds the shards'.

    root     broadcast ──> shards ──> clients          the same bytes for everybody
             aggregate <── Subtotal <── uploads        any grouping of the clients gives the same bits

A round's sum is one of integers (sums.py), and its mean is taken at the root, so the state is that of one server with
all of these clients. docs/scaling.md says how shards are run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

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
        drawn: the clients of all shards that a round's cohort has.
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

    @classmethod
    def make(cls, inner: Any, drawn: Callable[[int], Sequence[int]]) -> Self:
        """The tree's form of an algorithm.

        Raises:
            FedKSeedError: its server needs more of the uploads than their sum.
        """
        if not isinstance(inner, KSeed):
            raise FedKSeedError(
                "[network] shards is for uploads that are added up along K directions, where neither [secure] nor the "
                "[privacy] of clients is set: choose fedkseed, -pro, -plus or -backprop, or one server"
            )
        if inner.trust.rule != "mean" or inner.trust.agreement:
            raise FedKSeedError(
                f"[trust] rule = {inner.trust.rule!r} with agreement = {str(inner.trust.agreement).lower()} compares "
                "single uploads, and a root with [network] shards sees sums: set rule = 'mean' and agreement = false"
            )
        return cls(inner, drawn)

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
            FedKSeedError: there is no subtotal, or one is of another run or round, came twice, has a client that is
                in another's or is none, or numbers that its clients could not have sent. The state is unchanged.
        """
        ordered, size = in_order(uploads, self.run, state.round), self.run.pool.size
        left = {*self.drawn(state.round)}
        total, sizes, counts = Sum(np.zeros(size, np.int64), 0), np.zeros(size, np.int64), np.zeros(size, np.int64)
        for one in ordered:
            self._require(one, left)
            left.difference_update(one.clients.tolist())
            total += Sum(one.values, one.weight)
            sizes, counts = sizes + one.sizes, counts + one.counts
        if total.weight > HEAVIEST:
            raise FedKSeedError(f"the clients of this round weigh {total.weight}, integers hold the sum of {HEAVIEST}")
        return self.inner.added(state, total, sizes, counts)

    def _require(self, one: Subtotal, left: set[int]) -> None:
        """Refuse a subtotal that is not the sum of uploads of clients that were drawn, or that is of another's clients.

        A shard can then do what its clients could do together, and no more.
        """
        who = f"the subtotal of shard {one.client}"
        if strangers := sorted({*one.clients.tolist()} - left):
            raise FedKSeedError(
                f"{who} has clients that are not in round {one.round + 1}, or in another shard: {strangers[:10]}; each "
                "shard has numbers of its own, --first and those after it"
            )
        heaviest = min(HEAVIEST, (self.inner.trust.most_examples or HEAVIEST) * one.clients.size)
        if one.weight > heaviest:
            raise FedKSeedError(f"{who} weighs {one.weight}, its {one.clients.size} clients {heaviest} at most")
        asked = self.inner.local.scalars
        if int(one.counts.sum(dtype=np.int64)) > (all_ := asked * one.clients.size):
            raise FedKSeedError(f"{who} has more than the {all_} scalars of its {one.clients.size} clients")
        clip = min(self.inner.local.clip * (1 + 1e-6), MOST * GRID)  # a clip is rounded on its way
        largest = max(int(one.values.max()), -int(one.values.min()))  # not abs: that of -2^63 is -2^63
        if largest * GRID > one.weight * min(asked * clip, MOST * GRID):
            raise FedKSeedError(f"{who} has a sum of {largest} along one direction, beyond what its clients may report")
        if np.any(one.sizes * GRID > one.counts * clip):
            raise FedKSeedError(f"{who} has scalars above the clip of {self.inner.local.clip:g}")

    def example(
        self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator
    ) -> Subtotal:
        """The subtotal of one client's random upload."""
        upload = self.inner.example(round_, client, examples, differentiates, rng)
        message = self.inner.broadcast(replace(self.inner.init(), round=round_), [client])[client]
        return self.inner.subtotal(message, client, [upload], len(self.drawn(round_)))
