"""Algorithms in which a client replays the rounds that it has missed, instead of getting weights or K sums.

The server keeps, for every round, the coefficients that moved the model, and sends each client those of
the rounds it was away. The cost to a client grows with its absence, whereas with FedKSeed it does not.

    drawn      scalars along directions that each client draws from 2^32: Zelikman et al., 2023
    shared     scalars along directions that all clients of a round share: DeComFL, Li et al., 2025
    projected  a backpropagated update projected on the round's K directions: EvoFed, Rahimi et al., 2023
    by tensor  the same for each tensor by itself, along directions that each client draws from the round's K, more of
               them where more has moved: Ferret, Shu et al., 2025
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ..directions import Pool
from ..errors import FedKSeedError, require_choice
from ..local.client import Client
from ..randomness import Purpose, draw_directions, generator
from ..strategy import FULL, Settings, Strategy
from ..wire.numbers import scalars
from ..wire.records import Change, History, Upload
from .checks import Arrivals, KeptUploads, merged, require_clipped, require_scalars, require_sendable, require_size

if TYPE_CHECKING:  # a server that adds up needs no PyTorch
    from ..directions.operations import DirectionSum
    from ..weights.full import FullWeights

LEAST = 2  # directions of a tensor that hardly moved, as in Ferret


@dataclass(frozen=True, slots=True)
class ReplayState:
    """The server's state: the coefficients that moved the model in every round, and the rounds that each client has."""

    round: int  # rounds done
    counts: NDArray[np.uint32]  # (rounds, 1 or tensors): coefficients of each round and tensor
    directions: NDArray[np.uint32]  # of all coefficients, if clients draw theirs; else empty
    coefficients: NDArray[np.float32]  # (n,), of all rounds
    clients: NDArray[np.uint32]  # clients that took part so far, ascending
    seen: NDArray[np.uint32]  # number of rounds in the model that each of these clients holds


@dataclass(frozen=True, slots=True)
class Replay:
    """The server of replayed rounds: it keeps the few coefficients that each round has moved the model by.

    Args:
        settings: `run` has the pool of unlimited directions; `pool` the size K and the family of a round's pool, whose
            key follows from the round.
        kind: `drawn`, `shared`, `projected` or `by tensor`, see the list at the top of this file.
    """

    state: ClassVar[type[ReplayState]] = ReplayState
    weights: ClassVar[str] = FULL
    remembers: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset()

    settings: Settings
    kind: str = "drawn"

    def __post_init__(self) -> None:
        kinds = ("projected", "by tensor") if self.settings.local.backpropagates else ("drawn", "shared")
        require_choice("kind", self.kind, kinds)

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Strategy[ReplayState]:
        server = cls(settings, **options)
        sized = server.kind != "by tensor"
        return Strategy(settings, server, server, ReplayClient(server), server.addressed, sized=sized)

    @property
    def pool(self) -> Pool:
        return self.settings.pool or self.settings.run.pool

    @property
    def blocks(self) -> int:
        """The number of separate runs of coefficients in a round."""
        return len(self.settings.tensors) if self.kind == "by tensor" else 1

    def round_pool(self, round_: int) -> Pool:
        """The K directions of a round."""
        key = generator(self.settings.run.pool.key, Purpose.ROUND, round_).integers(0, 1 << 64, dtype=np.uint64)
        return Pool(int(key), self.pool.size, self.pool.family)

    def drawn(self, round_: int, client: int, counts: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Directions that a client draws from the round's K without replacement, as many for each tensor as counted."""
        rng = generator(self.settings.run.pool.key, Purpose.DIRECTIONS, round_, client)
        chosen = [np.sort(np.argsort(rng.random(self.pool.size))[:count]) for count in counts.tolist()]
        return np.concatenate(chosen).astype(np.uint32)

    def implied(self, round_: int, size: int) -> NDArray[np.uint32]:
        """Directions that a message need not name: a round's own, in order."""
        first = round_ * self.settings.local.scalars if self.kind == "shared" else 0
        return (first + np.arange(size, dtype=np.int64)).astype(np.uint32)

    def init(self) -> ReplayState:
        none = np.empty(0, np.uint32)
        return ReplayState(0, none.reshape(0, self.blocks), none, np.empty(0, np.float32), none, none)

    def broadcast(self, state: ReplayState) -> History:
        """All rounds, for a new client, which holds the base model."""
        return self._history(state, 0)

    def addressed(
        self, state: ReplayState, cohort: Sequence[int], broadcast: Callable[[], bytes] = bytes
    ) -> dict[int, History]:
        """The rounds that each client has missed since it last took part."""
        seen = dict(zip(state.clients.tolist(), state.seen.tolist(), strict=True))
        histories = {since: self._history(state, since) for since in {seen.get(client, 0) for client in cohort}}
        return {client: histories[seen.get(client, 0)] for client in cohort}

    def _history(self, state: ReplayState, since: int) -> History:
        first = int(state.counts[:since].sum(dtype=np.int64))
        about = self.settings.run, state.round, self.settings.local.learning_rate(state.round), since
        return History(*about, state.counts[since:], state.directions[first:], state.coefficients[first:])

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return (Upload if self.kind == "drawn" else Change,)

    def start(self, state: ReplayState, sent: Mapping[int, Any], earlier_states: Any = None) -> KeptUploads:
        return KeptUploads(state, Arrivals.of(self.settings.run, state, sent))

    def add_(self, accumulator: KeptUploads, upload: Upload | Change) -> None:
        """Keep an upload: floating-point numbers are added up in one order, when all have come."""
        accumulator.arrivals.require(upload)
        local, size, tensors = self.settings.local, self.pool.size, len(self.settings.tensors)
        if isinstance(upload, Upload):
            require_scalars(upload, local.scalars, local.clip)
        elif self.kind == "shared":
            require_size(upload, local.scalars)
            require_clipped(upload.client, upload.values, local.clip)
        elif self.kind == "projected":
            require_size(upload, size)
        elif upload.counts.size != tensors or (upload.counts > size).any():
            raise FedKSeedError(
                f"client {upload.client} sent {upload.values.size} numbers for {upload.counts.size or 1} tensors, "
                f"up to {size} numbers for each of {tensors} tensors were asked for"
            )
        accumulator.keep_(upload)

    def finish(self, accumulator: KeptUploads) -> ReplayState:
        """The state with the round's coefficients appended: Σ_i (n_i / n) of those of client i with n_i examples."""
        uploads, state = accumulator.in_order(), accumulator.state
        if self.kind == "drawn":
            lr = self.settings.local.learning_rate(state.round) / self.settings.local.probes
            directions, coefficients = merged(uploads, self.settings.run, lr)
            counts = np.array([coefficients.size], np.uint32)
        else:
            counts, directions, coefficients = self._average(state.round, uploads)
        clients = np.array([upload.client for upload in uploads], np.uint32)
        everyone = np.union1d(state.clients, clients).astype(np.uint32)
        seen = np.zeros(everyone.size, np.uint32)
        seen[np.searchsorted(everyone, state.clients)] = state.seen
        seen[np.searchsorted(everyone, clients)] = state.round
        counts = np.concatenate([state.counts, counts[None]])
        directions = np.concatenate([state.directions, directions])
        coefficients = np.concatenate([state.coefficients, coefficients])
        return ReplayState(state.round + 1, counts, directions, coefficients, everyone, seen)

    def _average(
        self, round_: int, uploads: Sequence[Change]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32]]:
        """Counts, directions where clients drew them, and the weighted mean of the clients' numbers.

        Numbers along directions that a client did not draw count as zeros.
        """
        total, drawn = sum(upload.examples for upload in uploads), self.kind == "by tensor"
        size = self.pool.size if drawn else uploads[0].values.size
        sums, there = np.zeros((self.blocks, size)), np.zeros((self.blocks, size), bool)
        for upload in uploads:
            places: Any = ...
            if drawn:
                places = _owners(upload.counts), self.drawn(round_, upload.client, upload.counts)
            sums[places] += upload.examples / total * upload.values.astype(np.float64)
            there[places] = True
        mean = sums[there]
        if self.kind == "shared":
            mean *= -self.settings.local.learning_rate(round_) / self.settings.local.probes
        else:
            mean *= self.settings.server_lr
        require_sendable(round_, mean)
        directions = np.nonzero(there)[1].astype(np.uint32) if drawn else np.empty(0, np.uint32)
        return there.sum(1).astype(np.uint32), directions, mean.astype(np.float32)


@dataclass(frozen=True, slots=True)
class ReplayClient:
    """A client's part: the rounds that it lacks come down, and scalars or projections of its update go up."""

    message: ClassVar[type[History]] = History

    server: Replay

    def sync(self, message: History, weights: "FullWeights") -> None:
        """Go back to the model of the last sync and add, round by round, the rounds that it lacks.

        Raises:
            FedKSeedError: the weights are older or newer than the rounds in the message, or it holds
                directions that the rounds do not have; the weights are unchanged.
        """
        blocks, named = self.server.blocks, self.server.kind in ("drawn", "by tensor")
        if message.counts.shape[1] != blocks or (message.directions.size and not named):
            raise FedKSeedError(
                f"a history of this algorithm has {blocks} counts a round and names directions only where "
                f"clients draw them; got {message.counts.shape[1]} counts and {message.directions.size} directions"
            )
        if not message.since <= weights.version <= message.round:
            raise FedKSeedError(
                f"the client holds the model after {weights.version} rounds, the message tells of rounds "
                f"{message.since} to {message.round}; load the base model and ask for the whole history"
            )
        for _ in self._missed(message, weights.version):
            pass  # all is checked before a weight changes
        weights.back()
        for total, tensor in self._missed(message, weights.version):
            weights.add(total, tensor)
        weights.settle()
        weights.keep()
        weights.version = message.round

    def _missed(self, message: History, version: int) -> "Iterator[tuple[DirectionSum, int | None]]":
        """The sums that moved the model after its first `version` rounds, each for all tensors or for one."""
        from ..directions.operations import DirectionSum

        bounds = np.concatenate([[0], np.cumsum(message.counts.ravel(), dtype=np.int64)])
        server, kind, blocks = self.server, self.server.kind, self.server.blocks
        for round_ in range(version, message.round):
            pool = server.settings.run.pool if kind in ("drawn", "shared") else server.round_pool(round_)
            for block in range(blocks):
                place = (round_ - message.since) * blocks + block
                part = slice(bounds[place], bounds[place + 1])
                named, coefficients = message.directions[part], message.coefficients[part]
                if kind in ("shared", "projected"):
                    named = server.implied(round_, coefficients.size)
                yield DirectionSum(pool, *pool.select(named, coefficients)), block if kind == "by tensor" else None

    def train(self, message: History, client: "Client[FullWeights]") -> Upload | Change:
        run, local = self.server.settings.run, self.server.settings.local
        if local.backpropagates:
            return self._project(message, client)
        if self.server.kind == "drawn":
            key, size = run.pool.key, run.pool.size
            directions = draw_directions(key, message.round, client.number, local.scalars, size, None)
        else:
            directions = self.server.implied(message.round, local.scalars)
        steps = local.zeroth_order(client, message.round, message.lr, directions)
        about = (run, message.round, client.number, client.examples, steps.loss)
        if self.server.kind == "drawn":
            return Upload(*about, steps.scalars)
        return Change(*about, steps.skipped, np.nan_to_num(steps.scalars))  # NaN moves nothing

    def _project(self, message: History, client: "Client[FullWeights]") -> Change:
        """The upload of ⟨z_j, Δ⟩ / n, Δ the update of the local steps: Σ_j ⟨z_j, Δ⟩ z_j / n has the mean Δ.

        n is K; where it is `by tensor`, ⌊K ‖Δ_l‖ / max ‖Δ_l‖⌋ but at least LEAST, as in the official code.

        Raises:
            FedKSeedError: Δ has numbers that are not finite: the local steps diverged.
        """
        pool = self.server.round_pool(message.round)
        steps = self.server.settings.local.first_order(client, message.round, message.lr)
        about = (self.server.settings.run, message.round, client.number, client.examples, steps.loss, steps.skipped)
        products, moved = client.weights.change(pool), client.weights.distances()
        if not (np.isfinite(products).all() and np.isfinite(moved).all()):
            raise FedKSeedError(
                f"client {client.number} diverged in round {message.round}: what it learned is not finite; "
                "take a smaller [training] lr"
            )
        if self.server.kind == "projected":
            return Change(*about, (products.sum(0) / pool.size).astype(np.float32))
        shares = moved / moved.max() if moved.max() > 0 else moved
        counts = np.clip(np.floor(shares * pool.size), min(LEAST, pool.size), pool.size).astype(np.uint32)
        tensors, directions = _owners(counts), self.server.drawn(message.round, client.number, counts)
        return Change(*about, (products[tensors, directions] / counts[tensors]).astype(np.float32), counts)

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: Generator) -> Upload | Change:
        """An upload of the largest size; the exact size of `by tensor` is only known after training."""
        settings, kind = self.server.settings, self.server.kind
        size = self.server.pool.size if settings.local.backpropagates else settings.local.scalars
        about = settings.run, round_, client, examples, 1.0
        if kind == "drawn":
            return Upload(*about, scalars(rng.normal(size=size)))
        counts = np.full(self.server.blocks if kind == "by tensor" else 0, size, np.uint32)
        return Change(*about, 0, rng.normal(size=int(counts.sum()) or size).astype(np.float32) * 1e-9, counts)


def _owners(counts: NDArray[np.uint32]) -> NDArray[np.intp]:
    """The tensor of each of a client's numbers."""
    return np.repeat(np.arange(counts.size), counts)
