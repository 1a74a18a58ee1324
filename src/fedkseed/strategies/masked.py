"""FedKSeed under secure aggregation: the same rounds, of whose uploads the server learns the sum alone.

A client's change of c is put on a fixed grid and masked (`fedkseed.secure`); a round has a second leg, in which the
masks are taken off the sum. All clients count alike, and report neither loss nor number of examples.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..local.client import Client
from ..local.work import LocalWork
from ..randomness import EVERYONE, Purpose, draw_directions, generator
from ..strategy import COEFFICIENTS, OPTIONAL, Noise, Settings
from ..wire.codec import decode, encode
from ..wire.records import KEY, Broadcast, Masked, Run, Secured, Shares, Survivors
from .checks import NEVER
from .kseed import KSeed, State

if TYPE_CHECKING:  # a server aggregates without PyTorch; clear rounds need no `cryptography`
    from ..secure.grid import Grid
    from ..secure.masks import MaskRoster
    from ..secure.member import MaskingClient
    from ..weights.base import Pooled


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum of a round's changes on their grid, without masks."""

    run: Run
    round: int
    total: NDArray[np.int64]
    clients: int  # whose changes it is the sum of


@dataclass(frozen=True, slots=True)
class MaskedKSeed:
    """FedKSeed with masked uploads.

    Args:
        inner: the algorithm; it makes broadcasts, local steps and the server's step.
        grid: the grid on which changes are added up.
        keys: X25519 public key of each client, for the server.
        neighbours: clients with which each shares masks, see `MaskRoster`.
        name: of the run, where keys outlive it: 16 bytes that both sides know.
        noise: differential privacy, to which each client adds its share; None: no noise.
    """

    message: ClassVar[type[Secured]] = Secured
    request: ClassVar[type[Survivors]] = Survivors
    answer: ClassVar[type[Shares]] = Shares
    state: ClassVar[type[State]] = State
    weights: ClassVar[str] = COEFFICIENTS
    remembers: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = OPTIONAL

    inner: KSeed
    grid: "Grid"
    keys: Mapping[int, bytes] = field(default_factory=dict)
    neighbours: int | None = None
    name: bytes = b""
    noise: Noise | None = None

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Self:
        secure = settings.secure
        if secure is None or secure.norm is None:
            raise FedKSeedError("masked uploads need the largest norm of a client's change, and the settings have none")
        try:
            from ..secure.grid import Grid
        except ModuleNotFoundError as error:
            raise FedKSeedError(f"[secure] needs the package {error.name}: pip install 'fedkseed[secure]'") from error
        inner = KSeed.make(settings, **options)
        size = settings.local.scalars if settings.shared else settings.run.pool.size
        grid = Grid(secure.norm, secure.bits, size, settings.run.pool.key)
        return cls(inner, grid, secure.keys, secure.neighbours, secure.name, settings.noise)

    @property
    def run(self) -> Run:
        return self.inner.run

    @property
    def sized(self) -> bool:
        return True

    @property
    def replies(self) -> tuple[type[Masked], ...]:
        return (Masked,)

    def work(self, differentiates: bool) -> LocalWork:
        return self.inner.work(differentiates)

    def init(self) -> State:
        return self.inner.init()

    def broadcast(self, state: State, cohort: Sequence[int]) -> Mapping[int, Secured | Broadcast]:
        """The inner broadcast with the round's clients and their keys.

        Who has no key takes part in no round, as a newcomer that only wants the model, and gets the broadcast alone.
        """
        inner = self.inner.broadcast(state, cohort)
        members = sorted(client for client in cohort if client in self.keys)
        if not members:
            return inner
        if strangers := sorted({*cohort} - {*members}):
            raise FedKSeedError(f"clients {strangers} have no key for masks; register them with their keys")
        keys = np.frombuffer(b"".join(self.keys[client] for client in members), np.uint8).reshape(-1, KEY)
        broadcast = encode(inner[members[0]])
        message = Secured(self.run, state.round, np.array(members, np.uint32), keys, broadcast)
        self._roster(message, self.name).require()
        return dict.fromkeys(members, message)

    def sync(self, message: Secured | Broadcast, weights: "Pooled") -> None:
        self.inner.sync(self._inside(message), weights)

    def train(self, message: Secured, client: "Client[Pooled]") -> Masked:
        member = _member(client)
        roster, broadcast = self._roster(message, member.run), self._inside(message)
        member.place(roster)  # before an hour of training
        upload = self.inner.train(broadcast, client)
        member.allow(upload)
        change = self.inner.change(broadcast, upload)
        codes = self.grid.coded(change, message.round, client.number)
        if variance := self.variance(roster.members.size):
            codes = codes + member.noise(roster, variance, codes)
        return member.masked(self.run, roster, codes, self.width(roster.members.size))

    def requests(self, messages: Mapping[int, Secured], uploads: Sequence[Masked]) -> Mapping[int, Survivors]:
        from ..secure.server import requests

        roster = self._roster(next(iter(messages.values())), self.name)
        width = self.width(roster.members.size)
        return requests(self.run, roster, uploads, width, self.grid.padded)

    def needed(self, clients: int) -> int:
        return 2 * clients // 3 + 1

    def require(self, client: int, sent: bytes, reply: bytes, uploads: Mapping[int, bytes]) -> None:
        from ..secure.server import require_shares, require_upload

        message, record = decode(sent, Secured, Survivors), decode(reply, Masked, Shares)
        self.run.require(record.run)
        if (record.client, record.round) != (client, message.round):
            raise FedKSeedError(
                f"client {client} was sent round {message.round}, and the answer is of client {record.client}, round "
                f"{record.round}"
            )
        match message, record:
            case Secured(), Masked():
                roster = self._roster(message, self.name)
                require_upload(roster, record, self.width(roster.members.size), self.grid.padded)
            case Survivors(), Shares():
                require_shares(self._asked(message, self.name), record, message.there)
            case _:
                raise FedKSeedError(f"client {client} answered a {type(message).__name__} by {type(record).__name__}")

    def respond(self, request: Survivors, client: "Client[Pooled]") -> Shares:
        member = _member(client)
        return member.shares(request, self._asked(request, member.run))

    def combined(self, messages: Mapping[int, Secured], uploads: Sequence[Masked], answers: Sequence[Shares]) -> Summed:
        """The sum of those whose uploads have come, without masks.

        Raises:
            FedKSeedError: too few shares have come, or what they give is no sum of uploads; nothing is counted.
        """
        from ..secure.server import unmasked

        message = next(iter(messages.values()))
        roster = self._roster(message, self.name)
        shares = {one.client: one for one in answers}
        total = unmasked(roster, uploads, shares, self.width(roster.members.size))
        self.grid.require_plausible(total, len(uploads), len(uploads) * self.variance(roster.members.size))
        return Summed(self.run, message.round, total, len(uploads))

    def aggregate(self, state: State, uploads: Sequence[Summed], earlier: Mapping[int, State] = NEVER) -> State:
        """The state after c ← c + Δ with the mean change Δ of the clients whose uploads have come.

        Raises:
            FedKSeedError: the sum is of another round or run.
        """
        (summed,) = uploads
        self.run.require(summed.run)
        if summed.round != state.round:
            raise FedKSeedError(f"a sum of round {summed.round} can't be added in round {state.round}")
        mean, pool = self.grid.change(summed.total, state.round) / summed.clients, self.run.pool
        if self.inner.shared:
            along, mean = mean, np.zeros(pool.size)
            drawn = draw_directions(pool.key, state.round, EVERYONE, along.size, pool.size, None)
            np.add.at(mean, drawn, along)
        return self.inner.stepped(state, -mean)

    def example(
        self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator
    ) -> Masked:
        """An upload of the size that this client's has with the whole cohort of `keys`, or with ten clients."""
        from ..secure.masks import SEED, TAG, USUAL

        clients = max(3, len(self.keys) or 10)
        width = self.width(clients)
        holders = min(clients, (self.neighbours or USUAL) + 1)
        numbers = rng.integers(0, 1 << width, self.grid.padded, np.uint32)
        bundles = rng.integers(0, 256, (holders - 2 * holders // 3, holders * SEED + TAG), np.uint8)
        return Masked(self.run, round_, client, width, numbers, bundles)

    def variance(self, clients: int) -> int:
        """The variance σ² of the noise that each of a round's clients adds to each of its whole numbers; 0: none.

        The noise of more than half of the clients is enough: a sum of fewer is not to be had, even by a server that
        names other survivors to some clients than to others (docs/secure.md). Those that tell the server their own
        noise are not counted on.
        """
        if self.noise is None:
            return 0
        honest = clients // 2 + 1 - int(self.noise.colluding * clients)
        return math.ceil((self.noise.multiplier * self.grid.sensitivity) ** 2 / max(1, honest))

    def width(self, clients: int) -> int:
        """Bits of a masked number in a round of this many clients."""
        return self.grid.width(clients, clients * self.variance(clients))

    def _inside(self, message: Secured | Broadcast) -> Broadcast:
        if isinstance(message, Broadcast):
            return message
        broadcast = decode(message.broadcast, Broadcast)
        self.run.require(broadcast.run)
        if broadcast.round != message.round:
            raise FedKSeedError(f"a message of round {message.round} holds the broadcast of round {broadcast.round}")
        return broadcast

    def _roster(self, message: Secured, name: bytes) -> "MaskRoster":
        from ..secure.masks import MaskRoster

        digest = hashlib.sha256(message.broadcast).digest()
        return MaskRoster(name, message.round, message.members, message.keys, digest, self.neighbours)

    def _asked(self, request: Survivors, name: bytes) -> "MaskRoster":
        from ..secure.masks import MaskRoster

        return MaskRoster(name, request.round, request.members, request.keys, request.broadcast, self.neighbours)


def _member(client: Client[Any]) -> "MaskingClient":
    if client.member is None:
        raise FedKSeedError(f"client {client.number} has no key for masks, and [secure] asks for masked uploads")
    return client.member


def simulated_key(seed: int, client: int) -> bytes:
    """The private key of a simulated client, from the recipe's seed: nobody is there to hide it from."""
    return generator(seed, Purpose.KEYS, client).bytes(KEY)
