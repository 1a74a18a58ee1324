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
from numpy.typing import NDArray

from ..directions import Pool
from ..errors import FedKSeedError
from ..local.client import Client
from ..local.schedules import require_choice
from ..randomness import Purpose, draw_directions, generator
from ..strategy import FULL, NO_STATES, Settings, Strategy
from ..wire.numbers import scalars
from ..wire.records import Change, History, Upload
from .checks import NONE, Arrivals, KeptUploads, merged, require_clipped, require_scalars, require_sendable

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
class ReplayDirections:
    """The directions that the coefficients of a round are along, for server and clients alike.

    Args:
        settings: `run` has the pool of unlimited directions; `pool` the size K and the family of a round's pool, whose
            key follows from the round.
        kind: `drawn`, `shared`, `projected` or `by tensor`, see the list at the top of this file.
    """

    settings: Settings
    kind: str = "drawn"

    def __post_init__(self) -> None:
        kinds = ("projected", "by tensor") if self.settings.local.backpropagates else ("drawn", "shared")
        require_choice("kind", self.kind, kinds)

    @property
    def pool(self) -> Pool:
        return self.settings.pool or self.settings.run.pool

    @property
    def named(self) -> bool:
        """Whether clients have directions of their own, which a history has to name."""
        return self.kind in ("drawn", "by tensor")

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

    def implied(self, round_: int, part: slice) -> NDArray[np.uint32]:
        """Directions that a message need not name: a round's own, in order."""
        size = part.stop - part.start
        first = round_ * self.settings.local.scalars if self.kind == "shared" else 0
        return (first + np.arange(size, dtype=np.int64)).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Replay:
    """The server of replayed rounds: it keeps the few coefficients that each round has moved the model by."""

    state: ClassVar[type[ReplayState]] = ReplayState
    weights: ClassVar[str] = FULL
    remembers: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset()

    settings: Settings
    directions: ReplayDirections

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Strategy[ReplayState]:
        directions = ReplayDirections(settings, **options)
        server = cls(settings, directions)
        client, sized = ReplayClient(settings, directions), directions.kind != "by tensor"
        return Strategy(settings, server, server, client, server.addressed, sized=sized)

    def init(self) -> ReplayState:
        counts = np.empty((0, self.directions.blocks), np.uint32)
        return ReplayState(0, counts, NONE, np.empty(0, np.float32), NONE, NONE)

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
        lr = self.settings.local.learning_rate(state.round)
        return History(
            self.settings.run, state.round, lr, since,
            state.counts[since:], state.directions[first:], state.coefficients[first:],
        )  # fmt: skip

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return (Upload if self.directions.kind == "drawn" else Change,)

    def start(
        self, state: ReplayState, sent: Mapping[int, Any], earlier_states: Mapping[int, ReplayState] = NO_STATES
    ) -> KeptUploads[ReplayState]:
        return KeptUploads(state, Arrivals.of(self.settings.run, state, sent))

    def add_(self, accumulator: KeptUploads[ReplayState], upload: Upload | Change) -> None:
        """Keep an upload: floating-point numbers are added up in one order, when all have come.

        Raises:
            FedKSeedError: it is of another round or run, has another number of values than was asked for or one above
                the clip, or came twice.
        """
        accumulator.arrivals.require(upload)
        if isinstance(upload, Upload):
            require_scalars(upload, self.settings.local.scalars, self.settings.local.clip)
        else:
            self._require(upload)
        accumulator.keep_(upload)

    def _require(self, upload: Change) -> None:
        size, tensors = self.directions.pool.size, len(self.settings.tensors)
        if self.directions.kind == "by tensor":
            wrong = upload.counts.size != tensors or (upload.counts > size).any()
            asked = f"up to {size} numbers for each of {tensors} tensors"
        else:
            size = self.settings.local.scalars if self.directions.kind == "shared" else size
            wrong, asked = upload.values.size != size, f"{size} numbers"
        if wrong:
            raise FedKSeedError(
                f"client {upload.client} sent {upload.values.size} numbers for {upload.counts.size or 1} tensors, "
                f"{asked} were asked for"
            )
        if self.directions.kind == "shared":
            require_clipped(upload.client, upload.values, self.settings.local.clip)

    def finish(self, accumulator: KeptUploads[ReplayState]) -> ReplayState:
        """The state with the round's coefficients appended: Σ_i (n_i / n) of the numbers of client i.

        n_i are the examples of client i.

        Raises:
            FedKSeedError: there is no upload, or the mean overflows.
        """
        uploads, state = accumulator.in_order(), accumulator.state
        if self.directions.kind == "drawn":
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
        return ReplayState(
            state.round + 1,
            np.concatenate([state.counts, counts[None]]),
            np.concatenate([state.directions, directions]),
            np.concatenate([state.coefficients, coefficients]),
            everyone,
            seen,
        )

    def _average(
        self, round_: int, uploads: Sequence[Change]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32]]:
        """Counts, directions where clients drew them, and the weighted mean of the clients' numbers.

        Numbers along directions that a client did not draw count as zeros.
        """
        total, drawn = sum(upload.examples for upload in uploads), self.directions.kind == "by tensor"
        size = self.directions.pool.size if drawn else uploads[0].values.size
        sums, there = np.zeros((self.directions.blocks, size)), np.zeros((self.directions.blocks, size), bool)
        for upload in uploads:
            places: Any = ...
            if drawn:
                places = _owners(upload.counts), self.directions.drawn(round_, upload.client, upload.counts)
            sums[places] += upload.examples / total * upload.values.astype(np.float64)
            there[places] = True
        mean = sums[there]
        if self.directions.kind == "shared":
            mean *= -self.settings.local.learning_rate(round_) / self.settings.local.probes
        else:
            mean *= self.settings.server_lr
        require_sendable(round_, mean)
        directions = np.nonzero(there)[1].astype(np.uint32) if drawn else NONE
        return there.sum(1).astype(np.uint32), directions, mean.astype(np.float32)


@dataclass(frozen=True, slots=True)
class ReplayClient:
    """A client's part: the rounds that it lacks come down, and scalars or projections of its update go up."""

    message: ClassVar[type[History]] = History

    settings: Settings
    directions: ReplayDirections

    def sync(self, message: History, weights: "FullWeights") -> None:
        """Go back to the model of the last sync and add, round by round, the rounds that it lacks.

        Raises:
            FedKSeedError: the weights are older or newer than the rounds in the message, or it holds
                directions that the rounds do not have; the weights are unchanged.
        """
        blocks, named = self.directions.blocks, self.directions.named
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
        kind, blocks = self.directions.kind, self.directions.blocks
        for round_ in range(version, message.round):
            pool = self.settings.run.pool if kind in ("drawn", "shared") else self.directions.round_pool(round_)
            for block in range(blocks):
                place = (round_ - message.since) * blocks + block
                part = slice(bounds[place], bounds[place + 1])
                named = self.directions.named
                directions = message.directions[part] if named else self.directions.implied(round_, part)
                total = DirectionSum(pool, *pool.select(directions, message.coefficients[part]))
                yield total, block if kind == "by tensor" else None

    def train(self, message: History, client: "Client[FullWeights]") -> Upload | Change:
        run, local = self.settings.run, self.settings.local
        if local.backpropagates:
            return self._project(message, client)
        if self.directions.kind == "drawn":
            key, size = run.pool.key, run.pool.size
            directions = draw_directions(key, message.round, client.number, local.scalars, size, None)
        else:
            directions = self.directions.implied(message.round, slice(0, local.scalars))
        steps = local.zeroth_order(client, message.round, message.lr, directions)
        about = (run, message.round, client.number, client.examples)
        if self.directions.kind == "drawn":
            return Upload(*about, steps.loss, steps.scalars)
        return Change(*about, steps.loss, steps.skipped, np.nan_to_num(steps.scalars), NONE)  # NaN moves nothing

    def _project(self, message: History, client: "Client[FullWeights]") -> Change:
        """The upload of ⟨z_j, Δ⟩ / n, Δ the update of the local steps: Σ_j ⟨z_j, Δ⟩ z_j / n has the mean Δ.

        n is K; where it is `by tensor`, ⌊K ‖Δ_l‖ / max ‖Δ_l‖⌋ but at least LEAST, as in the official code.

        Raises:
            FedKSeedError: Δ has numbers that are not finite: the local steps diverged.
        """
        pool = self.directions.round_pool(message.round)
        steps = self.settings.local.first_order(client, message.round, message.lr)
        about = (self.settings.run, message.round, client.number, client.examples, steps.loss, steps.skipped)
        products, moved = client.weights.change(pool), client.weights.distances()
        if not (np.isfinite(products).all() and np.isfinite(moved).all()):
            raise FedKSeedError(
                f"client {client.number} diverged in round {message.round}: what it learned is not finite; "
                "take a smaller [training] lr"
            )
        if self.directions.kind == "projected":
            return Change(*about, (products.sum(0) / pool.size).astype(np.float32), NONE)
        shares = moved / moved.max() if moved.max() > 0 else moved
        counts = np.clip(np.floor(shares * pool.size), min(LEAST, pool.size), pool.size).astype(np.uint32)
        tensors, directions = _owners(counts), self.directions.drawn(message.round, client.number, counts)
        return Change(*about, (products[tensors, directions] / counts[tensors]).astype(np.float32), counts)

    def example(
        self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator
    ) -> Upload | Change:
        """An upload of the largest size; the exact size of `by tensor` is only known after training."""
        about, counts = (self.settings.run, round_, client, examples, 1.0), NONE
        size = self.directions.pool.size if self.settings.local.backpropagates else self.settings.local.scalars
        if self.directions.kind == "drawn":
            return Upload(*about, scalars(rng.normal(size=size)))
        if self.directions.kind == "by tensor":
            counts = np.full(self.directions.blocks, size, np.uint32)
            size = int(counts.sum())
        return Change(*about, 0, rng.normal(size=size).astype(np.float32) * 1e-9, counts)


def _owners(counts: NDArray[np.uint32]) -> NDArray[np.intp]:
    """The tensor of each of a client's numbers."""
    return np.repeat(np.arange(counts.size), counts)
