"""FedKSeed, FedKSeed-Pro and extensions of them: the model is K coefficients.

Qin et al., 2024, Algorithm 1, https://arxiv.org/abs/2312.06353

Forward-only clients send a scalar a step; clients that take derivatives of the loss send the change of each
coefficient. Both are changes of c, so that one round can have clients of both kinds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..local.client import Client
from ..local.derivatives import derivative_steps
from ..local.optimizers import NOTHING, SGD, Moments, Optimizer
from ..local.schedules import require_choice
from ..local.work import LocalWork
from ..local.zeroth_order import zeroth_order_steps
from ..randomness import EVERYONE, draw_directions
from ..strategy import COEFFICIENTS, OPTIONAL, Settings, Trust
from ..wire.numbers import GRID, WIRES, rounded, scalars
from ..wire.records import Broadcast, Change, Run, Subtotal, Upload
from .agreement import WHOLE, Evidence
from .checks import NEVER, NONE, drawn_by, in_order, require_change, require_scalars, require_sendable, require_size
from .robust import RULES, cut, sum_of
from .sums import HEAVIEST, MOST, Contribution, Sum, require_summable, summed, tallied

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from torch import Tensor

    from ..weights.base import Pooled


@dataclass(frozen=True, slots=True)
class State:
    """The server's state; its size does not depend on the model's."""

    round: int  # rounds done
    coefficients: NDArray[np.float64]  # (K,), c = −η A of the paper
    magnitudes: NDArray[np.int64]  # (K,), Σ |ρ| of a direction in units of GRID
    counts: NDArray[np.int64]  # (K,), how often a direction was drawn
    first: NDArray[np.float64] = field(default_factory=NOTHING.copy)  # (K,) or (0,), moments of the server's optimiser
    second: NDArray[np.float64] = field(default_factory=NOTHING.copy)
    # Evidence about clients, see agreement.py; empty where none is asked for.
    gradients: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    draws: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    clients: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    agreement: NDArray[np.float64] = field(default_factory=NOTHING.copy)
    directions: NDArray[np.float64] = field(default_factory=NOTHING.copy)

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.gradients, self.draws, self.clients, self.agreement, self.directions)


@dataclass(frozen=True, slots=True)
class KSeed:
    """FedKSeed: scalar gradients along a fixed pool of directions.

    Args:
        run: the pool and the base model.
        local: steps of clients that run the model forward only, see `LocalWork`. c holds steps and not gradients, so
            any schedule is right. Clients that take derivatives move no coefficient by more than its η τ clip.
        importance: whether directions are drawn by the mean size of their scalar gradients (FedKSeed-Pro).
        derivatives: steps of clients that bring a loss with a graph (`Client.graph`), in R^K; None: all clients
            run the model forward only.
        server, server_lr: the server's step with Δ, the mean change of c: c ← c + η_s Δ, or an optimiser's
            step with −Δ in place of a gradient (Reddi et al., 2021).
        wire: the precision of numbers that travel, `exact`, `compact` or `sign` (wire/numbers.py). The server keeps c
            in full, so that the rounding error of 8 bits in a broadcast is sent as soon as it has grown (error
            feedback); that of a change in an upload, at most a 254th of the largest of 128 numbers, is lost. With
            `sign`, a step moves a coefficient by η, and all |ρ| are 1: importance is the same for all directions.
        max_staleness: the largest number of rounds since a client began; 0: all clients of a round begin with it.
        staleness_power: an upload that is s rounds old counts (1 + s)^−power times as much as a new one.
        trust: the rule by which uploads are added up, and the weights that clients may claim.
        shared: whether all clients of a round step along the same directions, so that their scalars align.
    """

    message: ClassVar[type[Broadcast]] = Broadcast
    state: ClassVar[type[State]] = State
    weights: ClassVar[str] = COEFFICIENTS
    remembers: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = OPTIONAL
    needs_single_uploads: ClassVar[frozenset[tuple[str, object]]] = frozenset({("importance", True)})

    run: Run
    local: LocalWork
    importance: bool = False
    derivatives: LocalWork | None = None
    server: Optimizer = SGD
    server_lr: float = 1.0
    wire: str = "compact"
    max_staleness: int = 0
    staleness_power: float = 0.5
    trust: Trust = field(default_factory=Trust)
    shared: bool = False

    def __post_init__(self) -> None:
        require_choice("[trust] rule", self.trust.rule, tuple(RULES))
        require_choice("kind of forward-only steps", self.local.steps_of, ("two points",))
        require_choice("wire", self.wire, WIRES)
        if self.derivatives is not None:
            require_choice("kind of derivative steps", self.derivatives.steps_of, ("sgd", "adam"))
        for name in ("max_staleness", "staleness_power"):
            if not (value := getattr(self, name)) >= 0:
                raise FedKSeedError(f"{name} must be at least 0, got {value}")

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Self:
        return cls(
            settings.run,
            settings.local,
            derivatives=settings.derivatives,
            server=Optimizer(settings.server),
            server_lr=settings.server_lr,
            wire=settings.wire or "compact",
            max_staleness=settings.max_staleness,
            staleness_power=settings.staleness_power,
            trust=settings.trust,
            shared=settings.shared,
            **options,
        )

    @property
    def sized(self) -> bool:
        return True

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return (Upload,) if self.derivatives is None else (Upload, Change)

    def work(self, differentiates: bool) -> LocalWork:
        return self.derivatives if differentiates and self.derivatives is not None else self.local

    def init(self) -> State:
        size = self.run.pool.size
        moments, none = self.server.init(size), np.zeros(size, np.int64)
        before = State(0, np.zeros(size), none, none.copy(), moments.first, moments.second)
        return replace(before, **_arrays(Evidence.none(size))) if self.trust.agreement else before

    def broadcast(self, state: State, cohort: Sequence[int]) -> dict[int, Broadcast]:
        message = Broadcast(
            run=self.run,
            round=state.round,
            lr=self.local.learning_rate(state.round),
            eps=self.local.eps,
            steps=self.local.steps,
            probes=self.local.probes,
            clip=float(np.float32(self.local.clip)),
            coefficients=self.rounded(state.coefficients),
            probabilities=self.probabilities(state),
            wire=self.wire,
        )
        return dict.fromkeys(cohort, message)

    def sync(self, message: Broadcast, weights: "Pooled") -> None:
        weights.load(message.coefficients)

    def train(self, message: Broadcast, client: "Client[Pooled]") -> Upload | Change:
        if self.derivatives is not None and client.graph is not None:
            return self._train_with_derivatives(message, client, client.graph, self.derivatives)
        pool, pairs = self.run.pool, message.steps * message.probes
        found = zeroth_order_steps(
            client.weights,
            client.loss,
            client.batches(message.round),
            draw_directions(
                pool.key, message.round, self.drawer(client.number), pairs, pool.size, message.probabilities
            ),
            probes=message.probes,
            lr=message.lr,
            eps=message.eps,
            clip=message.clip,
            wire=message.wire,
            on_step=client.on_step,
            noised=client.private and partial(client.private.mean, message.round),
        )
        return Upload(
            run=self.run,
            round=message.round,
            client=client.number,
            examples=client.claimed,
            loss=found.loss,
            scalars=found.scalars,
            wire=message.wire,
        )

    def _train_with_derivatives(
        self, message: Broadcast, client: "Client[Pooled]", loss: "Callable[[Any], Tensor]", work: LocalWork
    ) -> Change:
        moved = derivative_steps(
            client.weights,
            loss,
            client.batches(message.round),
            steps=work.count(client.examples),
            lr=work.learning_rate(message.round),
            optimizer=Optimizer(work.steps_of),
            on_step=client.on_step,
            noised=client.private and partial(client.private.mean, message.round),
        )
        values = self.rounded(np.clip(moved.change, -self.most(message.round), self.most(message.round)))
        client.weights.load(message.coefficients + values)  # the client holds exactly the change that it sends
        return Change(
            run=self.run,
            round=message.round,
            client=client.number,
            examples=client.claimed,
            loss=moved.loss,
            skipped=moved.skipped,
            values=values,
            counts=NONE,
            wire=self.wire_of_changes,
        )

    def aggregate(
        self, state: State, uploads: Sequence[Upload | Change], earlier: Mapping[int, State] = NEVER
    ) -> State:
        """The state after c ← c + Δ with the mean change Δ = Σ_i (n_i / n) (1 + s_i)^−power Δ_i.

        n_i are the examples of client i, at most [trust] most_examples, n those of all uploads. Δ_i is the change of c
        by client i: the one that it sent, or −η_i Σ ρ / P along each direction that it has drawn. s_i are the rounds
        since the round in which it began, η_i is the learning rate of that round. Where rounds are synchronous,
        s_i = 0, and, without an optimiser on the server, c is the weighted mean of the c that the clients ended with,
        plus the rounding error of the broadcast. Another [trust] rule takes the place of the mean.

        The sum is one of integers (sums.py), and so the same for any order, grouping or sharding of the uploads. The
        weight that stale uploads lose is not given to others: weights then add up to less than 1, as in FedBuff.

        Source of the factor: Nguyen et al., 2022, https://arxiv.org/abs/2106.06639

        Args:
            earlier: by round: the states with which the clients of older uploads began. FedKSeed-Pro needs the
                probabilities with which these clients drew their directions.

        Raises:
            FedKSeedError: there is no upload, or one is too old, of another run, came twice, has another size than
                was asked for, travelled with another precision, reports a scalar above the clip, or began with a state
                that is needed and not given; or the sum overflows. The state is unchanged.
        """
        ordered = in_order(uploads, self.run, state.round, self.max_staleness)
        drawn_with = {old: self.probabilities(began) for old, began in self._began(ordered, state, earlier).items()}
        heaviest = HEAVIEST // len(ordered) // (WHOLE if self.trust.agreement else 1)
        taken = [self._contribution(upload, state.round, drawn_with, heaviest) for upload in ordered]
        require_summable(taken, WHOLE if self.trust.agreement else 1)
        if self.trust.rule != "mean" or self.trust.agreement:  # evidence compares numbers: none may drown the others
            taken = cut(taken)
        evidence, size = state.evidence, self.run.pool.size
        if self.trust.agreement:
            weights, evidence = evidence.after(taken, self.trust.hostile)
            taken = [one.weighing(one.weight * weight) for one, weight in zip(taken, weights, strict=True) if weight]
        total = sum_of(self.trust.rule, taken, size, self.trust.hostile)
        return replace(self.added(state, total, *tallied(taken, size)), **_arrays(evidence))

    def added(self, state: State, total: Sum, sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> State:
        """The state after the server's step with a round's sum.

        Args:
            sizes, counts: Σ |ρ| of each direction in units of GRID, and how often it was drawn, shape (K,).

        Raises:
            FedKSeedError: the next broadcast could not carry the coefficients.
        """
        after = self.stepped(state, total.mean(self._unit(state.round)))
        return replace(after, magnitudes=state.magnitudes + sizes, counts=state.counts + counts)

    def subtotal(self, message: Broadcast, shard: int, uploads: Sequence[Upload | Change], asked: int) -> Subtotal:
        """The sum of some of a round's uploads, which a shard hands up; of none, if none of its clients was drawn.

        Args:
            message: the round's broadcast.
            shard: its number as a client of the server above it.
            asked: number of clients of the whole round; no weight is above its share of what integers hold.

        Raises:
            FedKSeedError: an upload is one that `aggregate` refuses.
        """
        size = self.run.pool.size
        ordered = in_order(uploads, self.run, message.round) if uploads else []
        drawn_with = {message.round: message.probabilities}
        taken = [self._contribution(upload, message.round, drawn_with, HEAVIEST // asked) for upload in ordered]
        require_summable(taken)
        total, (sizes, counts) = summed(taken, size), tallied(taken, size)
        losses = [upload.loss for upload in ordered if math.isfinite(upload.loss)]
        return Subtotal(
            run=self.run,
            round=message.round,
            client=shard,
            clients=np.array([upload.client for upload in ordered], np.uint32),
            weight=total.weight,
            loss=median(losses) if losses else math.nan,
            skipped=min(sum(upload.skipped for upload in ordered), (1 << 32) - 1),  # a client may claim any number
            values=total.values,
            sizes=sizes,
            counts=counts.astype(np.uint32),
        )

    def stepped(self, state: State, gradient: NDArray[np.float64]) -> State:
        """The state after the server's step with the clients' mean change −Δ of c as its gradient.

        Raises:
            FedKSeedError: the next broadcast could not carry the coefficients.
        """
        step, moments = self.server.step(Moments(state.first, state.second), gradient, state.round + 1)
        coefficients = state.coefficients - self.server_lr * step
        require_sendable(state.round, coefficients)
        return replace(
            state, round=state.round + 1, coefficients=coefficients, first=moments.first, second=moments.second
        )

    def change(self, message: Broadcast, upload: Upload | Change) -> NDArray[np.float64]:
        """The change of c that an upload to a broadcast stands for: of all K, or along the round's shared directions.

        Along directions of a client's own, scalars add up where one was drawn twice; shared ones stay apart.
        """
        if isinstance(upload, Change):
            return upload.values.astype(np.float64)
        moved = -message.lr / message.probes * np.nan_to_num(upload.scalars.astype(np.float64))
        return moved if self.shared else self._along_all(message, upload, moved)

    def checked_change(self, state: State, upload: Upload | Change) -> NDArray[np.float64]:
        """The change of all K coefficients that an upload of a state's round stands for.

        Raises:
            FedKSeedError: it has another size than was asked for, or reports a scalar or a change above the clip.
        """
        if isinstance(upload, Change):
            require_size(upload, self.run.pool.size)
            require_change(upload, self.most(state.round))
        else:
            require_scalars(upload, self.local.scalars, math.inf if self.wire == "sign" else self.local.clip, self.wire)
        return self.along_all(self.broadcast(state, [upload.client])[upload.client], upload)

    def along_all(self, message: Broadcast, upload: Upload | Change) -> NDArray[np.float64]:
        """The change of all K coefficients that an upload stands for, whoever has drawn its directions."""
        change = self.change(message, upload)
        return self._along_all(message, upload, change) if self.shared and isinstance(upload, Upload) else change

    def _along_all(
        self, message: Broadcast, upload: Upload | Change, moved: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        total, pool, drawer = np.zeros(self.run.pool.size), self.run.pool, self.drawer(upload.client)
        drawn = draw_directions(pool.key, message.round, drawer, moved.size, pool.size, message.probabilities)
        np.add.at(total, drawn, moved)
        return total

    def _contribution(
        self, upload: Upload | Change, round_: int, drawn_with: Mapping[int, NDArray[np.float32] | None], heaviest: int
    ) -> Contribution:
        """An upload as integers, in units of the present round; late ones count less.

        Args:
            drawn_with: probabilities of the directions in each round in which a client began.
            heaviest: largest weight: no claim of one client must make the sum of all too large for integers.
        """
        weight = min(self.trust.weight(upload.examples), heaviest)
        factor = (1 + round_ - upload.round) ** -self.staleness_power
        if isinstance(upload, Change):
            require_size(upload, self.run.pool.size)
            require_change(upload, self.most(upload.round))
            return Contribution.of_change(upload.client, weight, upload.values, self._unit(round_), factor)
        require_scalars(upload, self.local.scalars, math.inf if self.wire == "sign" else self.local.clip, self.wire)
        drawn = drawn_by(upload, self.run, drawn_with[upload.round], self.drawer(upload.client))
        factor *= self._unit(upload.round) / self._unit(round_)
        return Contribution.of_scalars(upload.client, weight, drawn, upload.scalars[upload.found], factor)

    def drawer(self, client: int) -> int:
        """The number by which a client draws its directions: its own, or EVERYONE."""
        return EVERYONE if self.shared else client

    def _unit(self, round_: int) -> float:
        """The change of a coefficient for a scalar gradient of GRID: η GRID / P."""
        return self.local.learning_rate(round_) / self.local.probes * GRID

    def example(
        self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator
    ) -> Upload | Change:
        if differentiates and self.derivatives is not None:
            values = self.rounded(rng.normal(size=self.run.pool.size) * 1e-9)
            return Change(self.run, round_, client, examples, 1.0, 0, values, NONE, self.wire_of_changes)
        found = scalars(rng.normal(size=self.local.scalars), self.wire)
        return Upload(self.run, round_, client, examples, 1.0, found, self.wire)

    def most(self, round_: int) -> float:
        """The furthest that a client may move a coefficient: that of all its two-point steps along one direction.

        Without a clip it is what integers hold (sums.py), less a half for the rounding of 8 bits.
        """
        return min(self.local.learning_rate(round_) * self.local.steps * self.local.clip, self._unit(round_) * MOST / 2)

    def rounded(self, numbers: NDArray[np.floating]) -> NDArray[np.float32]:
        """Numbers rounded as they travel."""
        return rounded(numbers, self.wire)

    @property
    def wire_of_changes(self) -> str:
        """The precision of the numbers of clients that take derivatives: signs alone would say too little."""
        return "compact" if self.wire == "sign" else self.wire

    def probabilities(self, state: State) -> NDArray[np.float32] | None:
        """Probabilities of directions in a state's round, as they travel; None: all are equally likely."""
        return self.rounded(importance(state)) if self.importance else None

    def _began(
        self, uploads: Sequence[Upload | Change], state: State, earlier: Mapping[int, State]
    ) -> dict[int, State]:
        """The states with which clients began, by round; any will do where directions are always equally likely."""
        began = {state.round: state}
        for upload in uploads:
            if self.importance and upload.round not in earlier and upload.round not in began:
                raise FedKSeedError(
                    f"client {upload.client} drew its directions in round {upload.round}; aggregate() needs its state"
                )
            began.setdefault(upload.round, earlier.get(upload.round, state))
        return began


def _arrays(evidence: Evidence) -> dict[str, NDArray[Any]]:
    """The fields of a state that hold the evidence."""
    return {field.name: getattr(evidence, field.name) for field in fields(evidence)}


def importance(state: State) -> NDArray[np.float64]:
    """Probabilities p of the directions, shape (K,): softmax of the min-max normalised mean |ρ|.

    A direction that was never drawn counts as the average of those that were: nothing is known
    of it, and with an extreme value it would be drawn too often or never again. (The official code starts
    each history with a zero instead, which makes often-drawn directions look important.)

    Source: Qin et al., 2024, Section 4.3
    """
    drawn = state.counts > 0
    if not drawn.any():
        return np.full(state.counts.size, 1 / state.counts.size)
    psi = np.divide(state.magnitudes, state.counts, out=np.zeros(drawn.size), where=drawn)
    psi[~drawn] = psi[drawn].mean()
    spread = psi.max() - psi.min()
    weights = np.exp((psi - psi.min()) / spread) if spread > 0 else np.ones_like(psi)
    return weights / weights.sum()
