"""FedKSeed, FedKSeed-Pro and extensions of them, on the server: the model is K coefficients.

Qin et al., 2024, Algorithm 1, https://arxiv.org/abs/2312.06353

    State       c, and what is known of directions and clients
    KSeed       init, broadcast; start, add_, finish: from the uploads of a round to the next c
    RoundSum    the uploads of a round so far
    importance  the probabilities with which FedKSeed-Pro draws directions

What clients do is in kseed_client.py; what their uploads stand for, in uploads.py. docs/aggregation.md defines the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError, require_choice
from ..local.optimizers import NOTHING, Optimizer
from ..strategy import COEFFICIENTS, NO_STATES, OPTIONAL, Settings, Strategy
from ..wire.numbers import WIRES, rounded
from ..wire.records import Broadcast, Change, Upload
from .agreement import GROUPS, WHOLE, weighed
from .checks import Arrivals, require_sendable
from .kseed_client import KSeedClient
from .robust import RULES, cut, sum_of
from .sums import HEAVIEST, Contribution, Sum
from .uploads import KSeedUpload, change_of, drawn_directions, require_sound, unit, wire_of


@dataclass(frozen=True, slots=True)
class State:
    """The server's state; its size does not depend on the model's."""

    round: int  # rounds done
    coefficients: NDArray[np.float64]  # (K,), c = −η A of the paper
    magnitudes: NDArray[np.int64]  # (K,), Σ |ρ| of a direction in units of GRID
    counts: NDArray[np.int64]  # (K,), how often a direction was drawn
    first: NDArray[np.float64] = field(default_factory=NOTHING.copy)  # (K,) or (0,), moments of the server's optimiser
    second: NDArray[np.float64] = field(default_factory=NOTHING.copy)
    # The evidence about clients, see agreement.py; empty where none is asked for.
    gradients: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))  # (GROUPS, K)
    draws: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))  # (GROUPS, K)
    clients: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))  # (n,), ascending
    agreement: NDArray[np.float64] = field(default_factory=NOTHING.copy)  # (n,)
    directions: NDArray[np.float64] = field(default_factory=NOTHING.copy)  # (n,)


@dataclass(slots=True)
class RoundSum:
    """The uploads of a round so far, added up as far as they can be.

    A weight is at most the n-th part of what integers hold, and how many uploads n there will be is known at the end.
    So an upload is added at once if its weight is small enough for as many uploads as clients were asked, and waits if
    it claims more; and all wait where a rule compares them.
    """

    state: State  # before the round
    arrivals: Arrivals
    probabilities: Mapping[int, NDArray[np.float32] | None]  # by the round in which a client began; None: all alike
    total: Sum
    waiting: dict[tuple[int, int], Contribution] = field(default_factory=dict)  # by client and round

    def in_order(self, most: int) -> list[Contribution]:
        """The contributions that wait, in the order of clients and rounds, none with a weight above `most`."""
        ordered = [self.waiting[key] for key in sorted(self.waiting)]
        return [replace(each, weight=min(each.weight, most)) for each in ordered]


@dataclass(frozen=True, slots=True)
class KSeed:
    """The server of FedKSeed: it keeps c, and takes the mean of its clients' changes of c as a gradient.

    Args:
        settings: c holds steps and not gradients, so any schedule of the rate is right. `wire` is `exact`, `compact` or
            `sign` (wire/numbers.py), by default compact. The server keeps c in full, so that the rounding error of 8
            bits in a broadcast is sent as soon as it has grown (error feedback); that of a change in an upload, at most
            a 254th of the largest of 128 numbers, is lost. With `sign`, a step moves a coefficient by η, and all |ρ|
            are 1: importance is the same for all directions.
        importance: whether directions are drawn by the mean size of their scalar gradients (FedKSeed-Pro).
    """

    state: ClassVar[type[State]] = State
    weights: ClassVar[str] = COEFFICIENTS
    remembers: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = OPTIONAL
    needs_single_uploads: ClassVar[frozenset[tuple[str, object]]] = frozenset({("importance", True)})

    settings: Settings
    importance: bool = False

    def __post_init__(self) -> None:
        settings = self.settings
        require_choice("[trust] rule", settings.trust.rule, tuple(RULES))
        require_choice("kind of forward-only steps", settings.local.steps_of, ("two points",))
        require_choice("wire", wire_of(settings), WIRES)
        if settings.derivatives is not None:
            require_choice("kind of derivative steps", settings.derivatives.steps_of, ("sgd", "adam"))
        for name in ("max_staleness", "staleness_power"):
            if not (value := getattr(settings, name)) >= 0:
                raise FedKSeedError(f"{name} must be at least 0, got {value}")

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Strategy[State]:
        server = cls(settings, **options)
        return Strategy(settings, server, server, KSeedClient(settings))

    def init(self) -> State:
        size = self.settings.run.pool.size
        zeros = np.zeros(size, np.int64)
        state = State(0, np.zeros(size), zeros, zeros.copy(), *Optimizer(self.settings.server).init(size))
        if not self.settings.trust.agreement:
            return state
        return replace(state, gradients=np.zeros((GROUPS, size), np.int64), draws=np.zeros((GROUPS, size), np.int64))

    def broadcast(self, state: State) -> Broadcast:
        local, wire = self.settings.local, wire_of(self.settings)
        lr, clip = local.learning_rate(state.round), float(np.float32(local.clip))
        c, p = rounded(state.coefficients, wire), self.probabilities(state)
        return Broadcast(self.settings.run, state.round, lr, local.eps, local.steps, clip, c, local.probes, p, wire)

    def probabilities(self, state: State) -> NDArray[np.float32] | None:
        """Probabilities of directions in a state's round, as they travel; None: all are equally likely."""
        return rounded(importance(state), wire_of(self.settings)) if self.importance else None

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return (Upload,) if self.settings.derivatives is None else (Upload, Change)

    def start(self, state: State, sent: Mapping[int, Any], earlier_states: Mapping[int, State] = NO_STATES) -> RoundSum:
        states = {state.round: state, **earlier_states}
        arrivals = Arrivals.of(self.settings.run, state, sent, self.settings.max_staleness)
        probabilities = {round_: self.probabilities(each) for round_, each in states.items()} if self.importance else {}
        return RoundSum(state, arrivals, probabilities, Sum.of([], self.settings.run.pool.size))

    def add_(self, accumulator: RoundSum, upload: KSeedUpload) -> None:
        """Add an upload.

        Raises:
            FedKSeedError: it was not asked for, says more than a client may or the next broadcast could carry, or began
                with a state that is needed and was not given.
        """
        settings, state, arrivals = self.settings, accumulator.state, accumulator.arrivals
        arrivals.require(upload)
        if self.importance and upload.round not in accumulator.probabilities:
            raise FedKSeedError(f"client {upload.client} drew by round {upload.round}'s state; aggregate() needs it")
        require_sound(settings, upload)
        contribution = self._contribution(upload, state.round, accumulator.probabilities.get(upload.round))
        moved = self.rate(state.round) * unit(settings, state.round) * contribution.values
        require_sendable(state.round, state.coefficients[contribution.directions] - moved)
        arrivals.note_(upload)
        most = len(arrivals.clients) * (1 + settings.max_staleness)  # uploads: a client's late ones, too
        if self._compares or contribution.weight > HEAVIEST // most:
            accumulator.waiting[upload.client, upload.round] = contribution
        else:
            accumulator.total.add_(contribution)

    @property
    def _compares(self) -> bool:
        """Whether a round's uploads are compared with each other, so that all must be there."""
        return self.settings.trust.rule != "mean" or self.settings.trust.agreement

    def _contribution(self, upload: KSeedUpload, round_: int, p: NDArray[np.float32] | None) -> Contribution:
        """An upload as integers, in units of the present round; late ones count less."""
        settings = self.settings
        weight = min(upload.examples, settings.trust.most_examples or upload.examples)
        factor = (1 + round_ - upload.round) ** -settings.staleness_power
        if isinstance(upload, Change):
            return Contribution.of_change(upload.client, weight, upload.values, unit(settings, round_), factor)
        drawn = drawn_directions(settings, upload.round, upload.client, upload.scalars.size, p)
        factor *= unit(settings, upload.round) / unit(settings, round_)
        return Contribution.of_scalars(upload.client, weight, drawn[upload.found], upload.scalars[upload.found], factor)

    def finish(self, accumulator: RoundSum) -> State:
        """The state after c ← c + Δ with the mean change Δ = Σ_i (n_i / n) (1 + s_i)^−power Δ_i.

        n_i are the examples of client i, at most [trust] most_examples, n those of all uploads. Δ_i is the change of c
        by client i: the one that it sent, or −η_i Σ ρ / P along each direction that it has drawn. s_i are the rounds
        since the round in which it began, η_i is the learning rate of that round. Where rounds are synchronous,
        s_i = 0, and, without an optimiser on the server, c is the weighted mean of the c that the clients ended with,
        plus the rounding error of the broadcast. Another [trust] rule takes the place of the mean. The weight that
        stale uploads lose is not given to others: weights then add up to less than 1, as in FedBuff.

        Source of the factor: Nguyen et al., 2022, https://arxiv.org/abs/2106.06639
        """
        accumulator.arrivals.require_any()
        state, trust, size = accumulator.state, self.settings.trust, self.settings.run.pool.size
        count = len(accumulator.arrivals.came)
        waiting = accumulator.in_order(HEAVIEST // count // (WHOLE if trust.agreement else 1))
        if not self._compares:
            return self.added(state, accumulator.total + Sum.of(waiting, size))
        contributions = cut(waiting)  # none may drown the others
        if trust.agreement:
            weights, state = weighed(state, contributions, trust.hostile)
            pairs = zip(contributions, weights, strict=True)
            contributions = [replace(each, weight=each.weight * weight) for each, weight in pairs if weight]
        return self.added(state, sum_of(trust.rule, contributions, size, trust.hostile))

    def added(self, state: State, total: Sum) -> State:
        """The state after the server's step with a round's sum."""
        after = self.stepped(state, total.mean(unit(self.settings, state.round)))
        return replace(after, magnitudes=state.magnitudes + total.sizes, counts=state.counts + total.counts)

    def stepped(self, state: State, gradient: NDArray[np.float64]) -> State:
        """The state after the server's step with the clients' mean change −Δ of c as its gradient."""
        optimizer = Optimizer(self.settings.server)
        step, (first, second) = optimizer.step((state.first, state.second), gradient, state.round + 1)
        coefficients = state.coefficients - self.rate(state.round) * step
        require_sendable(state.round, coefficients)
        return replace(state, round=state.round + 1, coefficients=coefficients, first=first, second=second)

    def rate(self, round_: int) -> float:
        """The server's rate: its step of round r < N counts (r + 1) / (N + 1), with N rounds of [trust] warmup."""
        return self.settings.server_lr * min(1.0, (round_ + 1) / (self.settings.trust.warmup + 1))

    def change(self, state: State, upload: KSeedUpload) -> NDArray[np.float64]:
        """The change of all K coefficients that a sound upload stands for; directions must be equally likely."""
        require_sound(self.settings, upload)
        return change_of(self.settings, upload)


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
