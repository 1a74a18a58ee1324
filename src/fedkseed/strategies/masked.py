"""FedKSeed under secure aggregation: the same rounds, of whose uploads the server learns the sum alone.

A client's change of c is put on a fixed grid and masked (`fedkseed.secure`); a round has a second leg, in which the
masks are taken off the sum. All clients count alike, and report neither loss nor number of examples.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..local.client import Client
from ..randomness import EVERYONE, Purpose, generator
from ..secure.grid import Grid
from ..secure.masks import SEED, TAG, USUAL, MaskRoster
from ..secure.member import MaskingClient
from ..secure.server import requests, require_shares, require_upload, unmasked
from ..strategy import ClientPart, Masking, SecondLeg, Settings, Strategy
from ..wire.codec import decode
from ..wire.records import KEY, WIDEST, Broadcast, Masked, Secured, Shares, Survivors, Upload
from .checks import Arrivals, KeptUploads
from .kseed import KSeed, State
from .uploads import KSeedUpload, along_all, change_of, change_of_probes

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from ..weights.base import Pooled


def masked(strategy: Strategy[State]) -> Strategy[State]:
    """The masked form of FedKSeed: other messages and uploads, a second leg, and the same server's step."""
    settings, secure = strategy.settings, strategy.settings.secure
    server: Any = strategy.aggregator
    if secure is None or secure.norm is None:
        raise FedKSeedError("masked uploads need the largest norm of a client's change, and the settings have none")
    size = settings.local.scalars if settings.shared else settings.run.pool.size
    masks = Masks(settings, secure, Grid(secure.norm, secure.bits, size, settings.run.pool.key))
    sums, client = MaskedAggregator(masks, server), MaskedClient(masks, strategy.client)
    legs = SecondLeg(Survivors, Shares, sums.requests, sums.add_shares_, lambda n: 2 * n // 3 + 1, client.respond)
    return replace(strategy, aggregator=sums, client=client, addressed=masks.addressed, second_leg=legs)


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a run, as server and clients agree on them."""

    settings: Settings
    # `keys` are the X25519 public keys of the clients, which the server knows; `name` is that of the run, where keys
    # outlive it: 16 bytes that both sides know.
    secure: Masking
    grid: Grid  # on which changes are added up

    def addressed(self, state: State, cohort: Sequence[int], broadcast: Callable[[], bytes]) -> Mapping[int, Secured]:
        """The broadcast with the round's clients and their keys."""
        keys, members = self.secure.keys, sorted(cohort)
        if strangers := [client for client in members if client not in keys]:
            raise FedKSeedError(f"clients {strangers} have no key for masks; register them with their keys")
        rows = np.frombuffer(b"".join(keys[client] for client in members), np.uint8).reshape(-1, KEY)
        message = Secured(self.settings.run, state.round, np.array(members, np.uint32), rows, broadcast())
        self.roster(message, self.secure.name).require()
        return dict.fromkeys(members, message)

    def roster(self, message: Secured | Survivors, name: bytes) -> MaskRoster:
        """The clients of a round, as either of its messages to them says.

        Clients that were sent other noise in their recipes, on which one that lists them would count in vain, share no
        mask.

        Args:
            name: of the run, as this party knows it.
        """
        if (noise := self.settings.noise) is not None:
            n = message.members.size
            name += b"\nnoise %d %d" % (self.variance(n, listed=False), int(noise.colluding * n))
        broadcast = message.broadcast if isinstance(message, Survivors) else hashlib.sha256(message.broadcast).digest()
        return MaskRoster(name, message.round, message.members, message.keys, broadcast, self.secure.neighbours)

    def variance(self, clients: int, listed: bool) -> int:
        """The variance σ² of the noise that one of a round's clients adds to each of its whole numbers; 0: none.

        Args:
            listed: whether the client's owner lists the keys of all of them. Else the server may have made up the
                others, and the client's own noise alone hides it.
        """
        if (noise := self.settings.noise) is None:
            return 0
        honest = self._honest(clients, noise.colluding) if listed else 1
        return math.ceil((noise.multiplier * self.grid.sensitivity) ** 2 / honest)

    def _honest(self, clients: int, colluding: float) -> int:
        """The least number of honest clients in any sum that a server can get by lying about survivors.

        Of n clients c work with it, e give a secret. Each honest one believes at most n − e gone, and e − c of them
        must believe that a client is gone to leave it out, so at most (n − c)(n − e) / (e − c) are
        (docs/privacy.md, "Two legs"). Where not all share masks with all, a server that tries out circles can have
        those c stand around one client: then nobody else's noise counts.
        """
        helpers, enough = int(colluding * clients), 2 * clients // 3 + 1
        if helpers and clients - 1 > (self.secure.neighbours or USUAL):
            return 1
        others = clients - helpers
        of_lies = others - others * (clients - enough) // (enough - helpers)
        return max(1, min(clients // 2 + 1 - helpers, of_lies))

    def width(self, clients: int) -> int:
        """Bits of a masked number in a round of this many clients, each with noise enough for itself."""
        bits = self.grid.width(clients, clients * self.variance(clients, listed=False))
        if bits > WIDEST:
            raise FedKSeedError(
                f"masked numbers of {clients} clients and their noise need {bits} bits, {WIDEST} go: lower [secure] "
                "bits, raise [privacy] epsilon, or let smaller cohorts take part"
            )
        return bits


@dataclass(slots=True)
class MaskedSum:
    """The masked uploads of a round: which masks come off depends on all that have come, and on the second leg."""

    kept: KeptUploads
    roster: MaskRoster
    width: int  # bits of a masked number
    shares: dict[int, Shares] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MaskedAggregator:
    """The server's sum of masked uploads."""

    replies: ClassVar[tuple[type[Masked], ...]] = (Masked,)

    masks: Masks
    server: KSeed  # makes the step with the mean change

    def start(self, state: State, sent: Mapping[int, Secured], earlier_states: Any = None) -> MaskedSum:
        roster = self.masks.roster(next(iter(sent.values())), self.masks.secure.name)
        kept = KeptUploads(state, Arrivals.of(self.masks.settings.run, state, sent))
        return MaskedSum(kept, roster, self.masks.width(roster.members.size))

    def add_(self, accumulator: MaskedSum, upload: Masked) -> None:
        accumulator.kept.arrivals.require(upload)
        require_upload(accumulator.roster, upload, accumulator.width, self.masks.grid.padded)
        accumulator.kept.keep_(upload)

    def requests(self, accumulator: MaskedSum) -> Mapping[int, Survivors]:
        """The second message to each client whose upload has come."""
        run, uploads = self.masks.settings.run, accumulator.kept.in_order()
        return requests(run, accumulator.roster, uploads, accumulator.width, self.masks.grid.padded)

    def add_shares_(self, accumulator: MaskedSum, answer: Shares) -> None:
        """Keep a client's answer of the second leg, or refuse it."""
        self.masks.settings.run.require(answer.run)
        there = np.isin(accumulator.roster.members, [*accumulator.kept.uploads])
        require_shares(accumulator.roster, answer, there)
        accumulator.shares[answer.client] = answer

    def finish(self, accumulator: MaskedSum) -> State:
        """The state after c ← c + Δ with the mean change Δ of the clients whose uploads have come.

        Raises:
            FedKSeedError: too few shares have come, or what they give is no sum of uploads; nothing is counted.
        """
        uploads, state, settings = accumulator.kept.in_order(), accumulator.kept.state, self.masks.settings
        total = unmasked(accumulator.roster, uploads, accumulator.shares, accumulator.width)
        variance = self.masks.variance(accumulator.roster.members.size, listed=False)  # the most
        self.masks.grid.require_plausible(total, len(uploads), len(uploads) * variance)
        mean = self.masks.grid.change(total, state.round) / len(uploads)
        if settings.shared:
            mean = along_all(settings, state.round, EVERYONE, mean)
        return self.server.stepped(state, -mean)


@dataclass(frozen=True, slots=True)
class MaskedClient:
    """A client's part: the local steps of another, whose upload is masked."""

    message: ClassVar[type[Secured]] = Secured

    masks: Masks
    inner: ClientPart

    def sync(self, message: Secured | Broadcast, weights: "Pooled") -> None:
        self.inner.sync(self.inside(message), weights)

    def inside(self, message: Secured | Broadcast) -> Broadcast:
        """The broadcast that a message holds; who takes part in no round gets it alone."""
        if isinstance(message, Broadcast):
            return message
        broadcast = decode(message.broadcast, Broadcast)
        self.masks.settings.run.require(broadcast.run)
        if broadcast.round != message.round:
            raise FedKSeedError(f"a message of round {message.round} holds the broadcast of round {broadcast.round}")
        return broadcast

    def train(self, message: Secured, client: "Client[Pooled]") -> Masked:
        member = _member(client)
        roster = self.masks.roster(message, member.run)
        member.place(roster)  # this and the width are looked at before an hour of training
        width, listed = self.masks.width(roster.members.size), member.members is not None
        upload = self.inner.train(self.inside(message), client)
        member.allow(upload)
        codes = self.masks.grid.coded(self.change(upload), message.round, client.number)
        if variance := self.masks.variance(roster.members.size, listed):
            codes = codes + member.noise(roster, variance, codes)
        return member.masked(self.masks.settings.run, roster, codes, width)

    def change(self, upload: KSeedUpload) -> NDArray[np.float64]:
        """The numbers that are added up: the change of all K coefficients, or along the round's shared directions.

        Along directions of a client's own, scalars add up where one was drawn twice; shared ones stay apart.
        """
        if self.masks.settings.shared and isinstance(upload, Upload):
            return change_of_probes(self.masks.settings, upload)
        return change_of(self.masks.settings, upload)

    def respond(self, request: Survivors, client: "Client[Pooled]") -> Shares:
        member = _member(client)
        return member.shares(request, self.masks.roster(request, member.run))

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: Generator) -> Masked:
        """A random upload, as large as this client's in a round of all clients in `keys`, or else of ten."""
        clients = max(3, len(self.masks.secure.keys) or 10)
        width = self.masks.width(clients)
        holders = min(clients, (self.masks.secure.neighbours or USUAL) + 1)
        numbers = rng.integers(0, 1 << width, self.masks.grid.padded, np.uint32)
        bundles = rng.integers(0, 256, (holders - 2 * holders // 3, holders * SEED + TAG), np.uint8)
        return Masked(self.masks.settings.run, round_, client, width, numbers, bundles)


def _member(client: Client[Any]) -> MaskingClient:
    if client.member is None:
        raise FedKSeedError(f"client {client.number} has no key for masks, and [secure] asks for masked uploads")
    return client.member


def simulated_key(seed: int, client: int) -> bytes:
    """The private key of a simulated client, from the recipe's seed: nobody is there to hide it from."""
    return generator(seed, Purpose.KEYS, client).bytes(KEY)
