"""Algorithms in which a client replays the rounds that it has missed, instead of getting weights or K sums.

The server keeps, for every round, the coefficients that moved the model, and sends each client those of
the rounds it was away. The cost to a client grows with its absence, whereas with FedKSeed it does not.

    drawn      scalars along directions that each client draws from 2^32: Zelikman et al., 2023
    shared     scalars along directions that all clients of a round share: DeComFL, Li et al., 2025
    projected  a backpropagated update projected on the round's K directions: EvoFed, Rahimi et al., 2023
    by tensor  the same for each tensor by itself, along directions that each client draws from the round's K, more of
               them where more has moved: Ferret, Shu et al., 2025
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from ..directions import Pool
from ..errors import FedKSeedError
from ..local.client import Client
from ..local.schedules import require_choice
from ..local.work import LocalWork
from ..randomness import Purpose, draw_directions, generator
from ..strategy import FULL, Settings
from ..wire.numbers import scalars
from ..wire.records import Change, History, Run, Upload
from .checks import NEVER, NONE, in_order, merged, require_clipped, require_scalars, require_sendable

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
    """Local steps that result in a few coefficients; a client catches up by replaying them.

    Args:
        run: the pool of unlimited directions, and the base model.
        pool: the size K and the family of a round's pool; its key follows from the round.
        tensors: the number of tuned tensors.
        kind: `drawn`, `shared`, `projected` or `by tensor`, see the list at the top of this file.
        local: settings of a client's local steps.
        server_lr: the factor of the mean of projected updates.
    """

    message: ClassVar[type[History]] = History
    state: ClassVar[type[ReplayState]] = ReplayState
    weights: ClassVar[str] = FULL
    remembers: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset()

    run: Run
    pool: Pool
    tensors: int
    local: LocalWork
    kind: str = "drawn"
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        projects = ("projected", "by tensor")
        require_choice("kind", self.kind, projects if self.local.backpropagates else ("drawn", "shared"))

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Self:
        tensors, local = len(settings.tensors), settings.local
        return cls(settings.run, settings.pool, tensors, local, server_lr=settings.server_lr, **options)

    @property
    def sized(self) -> bool:
        """Whether the size of a reply is known before training; that of `by tensor` is not."""
        return self.kind != "by tensor"

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return (Upload if self.kind == "drawn" else Change,)

    @property
    def draws(self) -> bool:
        """Whether clients have directions of their own, which a history has to name."""
        return self.kind in ("drawn", "by tensor")

    @property
    def blocks(self) -> int:
        """The number of separate runs of coefficients in a round."""
        return self.tensors if self.kind == "by tensor" else 1

    def work(self, differentiates: bool) -> LocalWork:
        return self.local

    def init(self) -> ReplayState:
        counts = np.empty((0, self.blocks), np.uint32)
        return ReplayState(0, counts, NONE, np.empty(0, np.float32), NONE, NONE)

    def broadcast(self, state: ReplayState, cohort: Sequence[int]) -> dict[int, History]:
        """The rounds that each client has missed since it last took part; a new client holds the base model."""
        lr = self.local.learning_rate(state.round)
        known = dict(zip(state.clients.tolist(), state.seen.tolist(), strict=True))
        bounds = np.concatenate([[0], np.cumsum(state.counts.sum(1, dtype=np.int64))])
        messages = {}
        for since in {known.get(client, 0) for client in cohort}:
            first = bounds[since]
            directions, coefficients = state.directions[first:], state.coefficients[first:]
            messages[since] = History(
                self.run, state.round, lr, since, state.counts[since:], directions, coefficients
            )  # fmt: skip
        return {client: messages[known.get(client, 0)] for client in cohort}

    def sync(self, message: History, weights: "FullWeights") -> None:
        """Go back to the model of the last sync and add, round by round, the rounds that it lacks.

        Raises:
            FedKSeedError: the weights are older or newer than the rounds in the message, or it holds
                directions that the rounds do not have; the weights are unchanged.
        """
        if message.counts.shape[1] != self.blocks or (message.directions.size and not self.draws):
            raise FedKSeedError(
                f"a history of this algorithm has {self.blocks} counts a round and names directions only where "
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
        for round_ in range(version, message.round):
            pool = self.run.pool if self.kind in ("drawn", "shared") else self.round_pool(round_)
            for block in range(self.blocks):
                place = (round_ - message.since) * self.blocks + block
                part = slice(bounds[place], bounds[place + 1])
                directions = message.directions[part] if self.draws else self.implied(round_, part)
                total = DirectionSum(pool, *pool.select(directions, message.coefficients[part]))
                yield total, block if self.kind == "by tensor" else None

    def train(self, message: History, client: "Client[FullWeights]") -> Upload | Change:
        about = (self.run, message.round, client.number, client.examples)
        if self.local.backpropagates:
            return self._project(message, client)
        pool, asked = self.run.pool, self.local.scalars
        if self.kind == "drawn":
            directions = draw_directions(pool.key, message.round, client.number, asked, pool.size, None)
        else:
            directions = self.implied(message.round, slice(0, asked))
        found = self.local.zeroth_order(client, message.round, message.lr, directions)
        if self.kind == "drawn":
            return Upload(*about, found.loss, found.scalars)
        return Change(*about, found.loss, found.skipped, np.nan_to_num(found.scalars), NONE)  # NaN moves nothing

    def aggregate(
        self,
        state: ReplayState,
        uploads: Sequence[Upload] | Sequence[Change],
        earlier: Mapping[int, ReplayState] = NEVER,
    ) -> ReplayState:
        """The state with the round's coefficients appended: Σ_i (n_i / n) of the numbers of client i.

        n_i are the examples of client i.

        Raises:
            FedKSeedError: there is no upload, or one is of another round or run, has another number of
                values than was asked for or one above the clip, or came twice, or the mean overflows; the
                state is unchanged.
        """
        directions = NONE
        if self.kind == "drawn":
            drawn = in_order(cast("Sequence[Upload]", uploads), self.run, state.round)
            for upload in drawn:
                require_scalars(upload, self.local.scalars, self.local.clip)
            ordered: Sequence[Upload] | Sequence[Change] = drawn
            lr = self.local.learning_rate(state.round) / self.local.probes
            directions, coefficients = merged(drawn, self.run, lr)
            counts = np.array([coefficients.size], np.uint32)
        else:
            ordered = in_order(cast("Sequence[Change]", uploads), self.run, state.round)
            counts, directions, coefficients = self._average(state.round, ordered)
        clients = np.array([upload.client for upload in ordered], np.uint32)
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

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator) -> Any:
        """A reply of the largest size; the exact size of `by tensor` is only known after training."""
        about, counts = (self.run, round_, client, examples, 1.0), NONE
        if self.kind == "drawn":
            return Upload(*about, scalars(rng.normal(size=self.local.scalars)))
        size = self.local.scalars if self.kind == "shared" else self.pool.size
        if self.kind == "by tensor":
            counts = np.full(self.tensors, self.pool.size, np.uint32)
            size = int(counts.sum())
        return Change(*about, 0, rng.normal(size=size).astype(np.float32) * 1e-9, counts)

    def round_pool(self, round_: int) -> Pool:
        """The K directions of a round."""
        key = int(generator(self.run.pool.key, Purpose.ROUND, round_).integers(0, 1 << 64, dtype=np.uint64))
        return Pool(key, self.pool.size, self.pool.family)

    def drawn(self, round_: int, client: int, counts: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Directions that a client draws from the round's K without replacement, as many for each tensor as counted."""
        rng = generator(self.run.pool.key, Purpose.DIRECTIONS, round_, client)
        chosen = [np.sort(np.argsort(rng.random(self.pool.size))[:count]) for count in counts.tolist()]
        return np.concatenate(chosen).astype(np.uint32)

    def implied(self, round_: int, part: slice) -> NDArray[np.uint32]:
        """Directions that a message need not name: a round's own, in order."""
        size = part.stop - part.start
        first = round_ * self.local.scalars if self.kind == "shared" else 0
        return (first + np.arange(size, dtype=np.int64)).astype(np.uint32)

    def _project(self, message: History, client: "Client[FullWeights]") -> Change:
        """The upload of ⟨z_j, Δ⟩ / n, Δ the update of the local steps: Σ_j ⟨z_j, Δ⟩ z_j / n has the mean Δ.

        n is K; where it is `by tensor`, ⌊K ‖Δ_l‖ / max ‖Δ_l‖⌋ but at least LEAST, as in the official code.

        Raises:
            FedKSeedError: Δ has numbers that are not finite: the local steps diverged.
        """
        free, pool = client.weights, self.round_pool(message.round)
        found = self.local.first_order(client, message.round, message.lr)
        about = (self.run, message.round, client.number, client.examples, found.loss, found.skipped)
        products, moved = free.change(pool), free.distances()
        if not (np.isfinite(products).all() and np.isfinite(moved).all()):
            raise FedKSeedError(
                f"client {client.number} diverged in round {message.round}: what it learned is not finite; "
                "take a smaller [training] lr"
            )
        if self.kind == "projected":
            return Change(*about, (products.sum(0) / pool.size).astype(np.float32), NONE)
        shares = moved / moved.max() if moved.max() > 0 else moved
        counts = np.clip(np.floor(shares * pool.size), min(LEAST, pool.size), pool.size).astype(np.uint32)
        tensors, directions = _owners(counts), self.drawn(message.round, client.number, counts)
        return Change(*about, (products[tensors, directions] / counts[tensors]).astype(np.float32), counts)

    def _average(
        self, round_: int, uploads: Sequence[Change]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32]]:
        """Counts, directions where clients drew them, and the weighted mean of the clients' numbers.

        Numbers along directions that a client did not draw count as zeros.
        """
        for upload in uploads:
            self._require(upload)
        total = sum(upload.examples for upload in uploads)
        size = self.pool.size if self.draws else uploads[0].values.size
        sums, there = np.zeros((self.blocks, size)), np.zeros((self.blocks, size), bool)
        for upload in uploads:
            places: Any = ...
            if self.draws:
                places = _owners(upload.counts), self.drawn(round_, upload.client, upload.counts)
            sums[places] += upload.examples / total * upload.values.astype(np.float64)
            there[places] = True
        counts = there.sum(1).astype(np.uint32)
        directions = np.nonzero(there)[1].astype(np.uint32) if self.draws else NONE
        mean = sums[there]
        if self.kind == "shared":
            mean *= -self.local.learning_rate(round_) / self.local.probes
        else:
            mean *= self.server_lr
        require_sendable(round_, mean)
        return counts, directions, mean.astype(np.float32)

    def _require(self, upload: Change) -> None:
        if self.kind == "by tensor":
            wrong = upload.counts.size != self.tensors or (upload.counts > self.pool.size).any()
            asked = f"up to {self.pool.size} numbers for each of {self.tensors} tensors"
        else:
            size = self.local.scalars if self.kind == "shared" else self.pool.size
            wrong, asked = upload.values.size != size, f"{size} numbers"
        if wrong:
            raise FedKSeedError(
                f"client {upload.client} sent {upload.values.size} numbers for {upload.counts.size or 1} tensors, "
                f"{asked} were asked for"
            )
        if self.kind == "shared":
            require_clipped(upload.client, upload.values, self.local.clip)


def _owners(counts: NDArray[np.uint32]) -> NDArray[np.intp]:
    """The tensor of each of a client's numbers."""
    return np.repeat(np.arange(counts.size), counts)
