"""The rule of the set: which entries are taken, which of them count, and the model that follows.

    taken      each upload that its peer has signed, for a round of its cohort, that the strategy can add up alone
    kept       of one peer and round, the two with the smallest names: peers that have the same entries keep the same
    counts     an entry that is alone in its peer's round; of two that contradict each other, none does
    the model  state after r steps = aggregate(state before, the entries that count in step r), from the first step on

Nothing of it depends on the order or the time in which entries come, so that equal sets are equal models, to the bit.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

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

KEPT = 2  # entries of one peer and round: two prove that it has contradicted itself


@dataclass(frozen=True, slots=True, order=True)
class OrderedUpload:
    """An entry as the set's order knows it."""

    name: bytes
    client: int
    round: int  # in which its client began
    step: int  # in which it counts


def run_digest(recipe: bytes, base: bytes, roster: Roster) -> bytes:
    """The digest of all that peers of one run must agree on: recipe, base model, keys and times.

    Args:
        base: SHA-256 of w_0.
    """
    facts = {"recipe": recipe.decode(), "base": base.hex(), **roster.facts()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class Rule:
    """The rule of one run's set.

    Args:
        run: digest of the run, see `run_digest`.
        keys: public keys of peers 0, 1, ….
        rounds: number of the run's rounds.
        drawn: maps a round to the peers that train in it.
    """

    run: bytes
    strategy: Strategy[State]
    keys: Sequence[EllipticCurvePublicKey]
    rounds: int
    drawn: Callable[[int], frozenset[int]] = field(repr=False)

    @classmethod
    def of(cls, text: bytes, recipe: Recipe, strategy: Strategy[Any], roster: Roster) -> "Rule":
        """The rule of a recipe's run.

        Args:
            text: the recipe as all peers have it.
        """
        if strategy.server.weights != COEFFICIENTS:
            name = type(strategy.server).__name__
            raise FedKSeedError(f"peers share a model of K coefficients, got the strategy {name}")
        late = KSeed.make(
            replace(strategy.settings, max_staleness=roster.max_staleness, staleness_power=roster.staleness_power)
        )
        count, clients = len(roster.peers), recipe.clients
        size = clients.cohort_of(count)
        run = run_digest(text, strategy.run.base, roster)
        drawn = [frozenset(cohort(recipe.seed, k, count, size, clients.draw)) for k in range(recipe.training.rounds)]
        return cls(run, late, roster.public_keys(), recipe.training.rounds, drawn.__getitem__)

    def mark(self, entry: SignedUpload, now: int) -> OrderedUpload:
        """The mark of an entry that belongs to the set; what is cheap to check comes first.

        Args:
            now: the round that is open by this peer's clock.

        Raises:
            FedKSeedError: its upload is broken or could not be added up, it is not of this run, or not signed.
        """
        upload = decode(entry.upload, *self.strategy.aggregator.replies)
        self.strategy.run.require(upload.run)
        client, began, step = upload.client, upload.round, entry.step
        if not (began < self.rounds and client < len(self.keys) and client in self.drawn(began)):
            raise FedKSeedError(f"peer {client} does not take part in round {began + 1} of {self.rounds}")
        if not began <= step <= min(began + self.strategy.settings.max_staleness, self.rounds - 1):
            raise FedKSeedError(
                f"peer {client} began in round {began + 1} and was done in round {step + 1}: it may be "
                f"{self.strategy.settings.max_staleness} rounds late, and the run has {self.rounds}"
            )
        if step > now:
            raise FedKSeedError(f"round {step + 1}, in which peer {client} was done, is not open by this peer's clock")
        if not verify(self.keys[client], entry.statement(self.run), entry.signature):
            raise FedKSeedError(f"the upload for round {began + 1} is not signed with the key of peer {client}")
        alone = replace(self._before, round=step)
        self._plain.aggregate(alone, [upload])  # else one upload could keep a step from being added up
        return OrderedUpload(entry.name(self.run), client, began, step)

    @cached_property
    def _plain(self) -> Strategy[State]:
        """The strategy without the comparison of uploads, which one alone does not need."""
        settings = self.strategy.settings
        return KSeed.make(replace(settings, trust=replace(settings.trust, rule="mean", agreement=False)))

    @cached_property
    def _before(self) -> State:
        return self._plain.server.init()

    def after(self, state: State, entries: Iterable[SignedUpload]) -> State:
        """The state after the step `state.round` with the entries that count in it.

        Where there are none, or where together they overflow, the model stays and the step is over.
        """
        uploads = [decode(entry.upload, *self.strategy.aggregator.replies) for entry in entries]
        nothing = replace(state, round=state.round + 1)
        if not uploads:
            return nothing
        try:
            return self.strategy.aggregate(state, uploads)
        except FedKSeedError:
            return nothing

    def base(self, state: State) -> bytes:
        """SHA-256 of the broadcast that is made of a state: from it, clients train, and it is the tuned model."""
        return hashlib.sha256(self.broadcast(state)).digest()

    def broadcast(self, state: State) -> bytes:
        return encode(self.strategy.server.broadcast(state))


def kept(slot: Iterable[OrderedUpload]) -> list[OrderedUpload]:
    """The marks of one peer and round that are kept: the two with the smallest names, in order."""
    return sorted(set(slot))[:KEPT]


def counted(slots: Mapping[tuple[int, int], Sequence[OrderedUpload]]) -> list[OrderedUpload]:
    """The marks that count: each alone in its slot, by (client, round)."""
    return [slots[key][0] for key in sorted(slots) if len(slots[key]) == 1]


def model_of(rule: Rule, data: Iterable[bytes]) -> State:
    """The state after all rounds that follows from a set of encoded entries: the definition, from nothing.

    Raises:
        FedKSeedError: an entry would not be taken.
    """
    entries = {rule.mark(entry, rule.rounds): entry for entry in map(SignedUpload.decode, data)}
    slots: dict[tuple[int, int], list[OrderedUpload]] = {}
    for mark in entries:
        slots[mark.client, mark.round] = kept([*slots.get((mark.client, mark.round), ()), mark])
    state = rule.strategy.server.init()
    while state.round < rule.rounds:
        state = rule.after(state, [entries[mark] for mark in counted(slots) if mark.step == state.round])
    return state
