"""The rule by which peers merge their uploads: which are taken, which of them count, and the model that follows.

    taken      each upload that its peer has signed, for a round of its cohort, that the strategy can add up alone
    kept       of one peer and round, the two with the smallest names: peers that have seen the same keep the same
    counts     an upload that is alone in its peer's round; of two that contradict each other, none does
    the model  state after r steps = aggregate(state before, the uploads that count in step r), from the first step on

The order and the time in which uploads come make no difference, so that equal sets are equal models, to the bit.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from ...errors import FedKSeedError
from ...recipe.schema import Recipe
from ...run.cohort import cohort
from ...strategies.kseed import KSeed, State
from ...strategy import COEFFICIENTS, Strategy
from ...wire.codec import decode, encode
from ..protocol.signatures import verify
from .roster import Roster
from .signed_upload import SignedUpload

MAX_PER_ROUND = 2  # uploads that are kept of one peer and round: two prove that it has contradicted itself


@dataclass(frozen=True, slots=True, order=True)
class UploadHeader:
    """A signed upload without its bytes: who made it, and where it counts."""

    name: bytes  # see `SignedUpload.name`
    client: int
    round: int  # in which its client began
    step: int  # in which it counts


# The headers that are kept of each peer and round in which it began, in order.
Slots: TypeAlias = dict[tuple[int, int], list[UploadHeader]]


@dataclass(frozen=True)
class MergeRule:
    """The rule of one run."""

    run: bytes  # digest of all that peers of one run must agree on: recipe, base model, keys and times
    strategy: Strategy[State]
    keys: Sequence[EllipticCurvePublicKey]  # of peers 0, 1, …
    rounds: int  # their number
    drawn: Callable[[int], frozenset[int]] = field(repr=False)  # maps a round to the peers that train in it

    @classmethod
    def of(cls, text: bytes, recipe: Recipe, strategy: Strategy[Any], roster: Roster) -> "MergeRule":
        """The rule of a recipe's run.

        Args:
            text: the recipe as all peers have it.
        """
        if strategy.server.weights != COEFFICIENTS:
            name = type(strategy.server).__name__
            raise FedKSeedError(f"peers share a model of K coefficients, got the strategy {name}")
        late = replace(strategy.settings, max_staleness=roster.max_staleness, staleness_power=roster.staleness_power)
        count, clients = len(roster.peers), recipe.clients
        size = clients.cohort_of(count)
        drawn = [frozenset(cohort(recipe.seed, k, count, size, clients.draw)) for k in range(recipe.training.rounds)]
        facts = {"recipe": text.decode(), "base": strategy.run.base.hex(), **roster.facts()}
        run = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
        return cls(run, KSeed.make(late), roster.public_keys(), recipe.training.rounds, drawn.__getitem__)

    def header(self, signed: SignedUpload, open_round: int) -> UploadHeader:
        """The header of an upload that is taken; what is cheap to check comes first.

        Args:
            open_round: by this peer's clock.

        Raises:
            FedKSeedError: it is broken or could not be added up, it is not of this run, or not signed.
        """
        upload = decode(signed.upload, *self.strategy.aggregator.replies)
        self.strategy.run.require(upload.run)
        client, began, step = upload.client, upload.round, signed.step
        if not (began < self.rounds and client < len(self.keys) and client in self.drawn(began)):
            raise FedKSeedError(f"peer {client} does not take part in round {began + 1} of {self.rounds}")
        if not began <= step <= min(began + self.strategy.settings.max_staleness, self.rounds - 1):
            raise FedKSeedError(
                f"peer {client} began in round {began + 1} and was done in round {step + 1}: it may be "
                f"{self.strategy.settings.max_staleness} rounds late, and the run has {self.rounds}"
            )
        if step > open_round:
            raise FedKSeedError(f"round {step + 1}, in which peer {client} was done, is not open by this peer's clock")
        if not verify(self.keys[client], signed.statement(self.run), signed.signature):
            raise FedKSeedError(f"the upload for round {began + 1} is not signed with the key of peer {client}")
        alone, first = self._alone  # else one upload could keep a step from being added up
        alone.aggregate(replace(first, round=step), [upload])
        return UploadHeader(signed.name(self.run), client, began, step)

    @cached_property
    def _alone(self) -> tuple[Strategy[State], State]:
        """The strategy without a comparison of uploads, for a single one, and its first state."""
        settings = self.strategy.settings
        strategy = KSeed.make(replace(settings, trust=replace(settings.trust, rule="mean", agreement=False)))
        return strategy, strategy.server.init()

    def next_state(self, state: State, counting: Iterable[SignedUpload]) -> State:
        """The state after the step `state.round` with the uploads that count in it.

        Where there are none, or where together they overflow, the model stays and the step is over.
        """
        uploads = [decode(signed.upload, *self.strategy.aggregator.replies) for signed in counting]
        with suppress(FedKSeedError):
            if uploads:
                return self.strategy.aggregate(state, uploads)
        return replace(state, round=state.round + 1)

    def broadcast(self, state: State) -> bytes:
        """The message from which peers train; after the last round, the tuned model."""
        return encode(self.strategy.server.broadcast(state))

    def broadcast_digest(self, state: State) -> bytes:
        return hashlib.sha256(self.broadcast(state)).digest()


def with_headers(slots: Slots, headers: Iterable[UploadHeader]) -> Slots:
    """The slots that further headers change or repeat: of each, the headers with the smallest names."""
    changed: Slots = {}
    for header in headers:
        place = header.client, header.round
        slot = changed.get(place) or slots.get(place, [])
        changed[place] = sorted({*slot, header})[:MAX_PER_ROUND]
    return changed


def counting(slots: Slots) -> list[UploadHeader]:
    """The headers of the uploads that count: each alone in its slot, by (client, round)."""
    return [slots[place][0] for place in sorted(slots) if len(slots[place]) == 1]


def model_of(rule: MergeRule, data: Iterable[bytes]) -> State:
    """The state after all rounds that follows from a set of encoded uploads: the definition, from nothing.

    Raises:
        FedKSeedError: one of them would not be taken.
    """
    uploads = {rule.header(signed, rule.rounds): signed for signed in map(SignedUpload.decode, data)}
    headers = counting(with_headers({}, uploads))
    state = rule.strategy.server.init()
    while state.round < rule.rounds:
        state = rule.next_state(state, [uploads[header] for header in headers if header.step == state.round])
    return state
