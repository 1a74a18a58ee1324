"""A client's side of secure aggregation: it masks its numbers, and gives shares of seeds.

Both answers follow from the private key and the messages alone, so a client that was stopped between the legs, or
another process of it, gives the same ones.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..wire.records import Masked, Run, Shares, Survivors
from .key_exchange import agreed
from .masks import SEED, MaskRoster, derived, mask, opened, sealed, share, signed
from .noise import discrete_gaussian


def _in_this_process() -> Callable[[int, str, bytes], None]:
    answered: dict[tuple[int, str], bytes] = {}

    def once(round_: int, leg: str, value: bytes) -> None:
        if answered.setdefault((round_, leg), value) != value:
            raise FedKSeedError(
                f"round {round_} was answered with another {leg}: from both answers the server could tell this "
                "client's numbers; it must go on with the first, or begin a new run"
            )

    return once


@dataclass(frozen=True, slots=True)
class MaskingClient:
    """A client of rounds with masks, which in each masks one vector and answers one set of survivors.

    Args:
        private: its X25519 key, 32 bytes.
        run: name of the run, see `MaskRoster`.
        once: notes a value for a leg of a round, and raises `FedKSeedError` if another one stands there.
        allow: raises `FedKSeedError` for an upload that must not be sent, which it is shown before it is masked.
        members: the public keys that the client's owner lists, by number; None: the server's word is taken.
    """

    number: int
    private: bytes = field(repr=False)
    run: bytes = b""
    once: Callable[[int, str, bytes], None] = field(default_factory=_in_this_process)
    allow: Callable[[Any], None] = lambda upload: None
    members: Mapping[int, bytes] | None = None

    @property
    def key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.private)

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    def place(self, roster: MaskRoster) -> int:
        """The place of this client in a round, all of whose keys are those of their clients."""
        roster.require()
        (place,) = np.flatnonzero(roster.members == self.number).tolist() or (None,)
        if place is None or roster.key(place) != self.public:
            raise FedKSeedError(f"client {self.number} is not in this round with its own key")
        for other in roster.others(place):
            agreed(self.key, roster.key(other))
        for number, key in zip(roster.members.tolist(), roster.keys, strict=True):
            if self.members is not None and self.members.get(number) != key.tobytes():
                known = self.members[number].hex() if number in self.members else "none"
                raise FedKSeedError(
                    f"the server says that client {number} has the key {key.tobytes().hex()} for masks, and this "
                    f"client's list of members has {known}: with keys of its own the server could take masks off"
                )
        return place

    def masked(self, run: Run, roster: MaskRoster, numbers: NDArray[np.int64], width: int) -> Masked:
        """The upload of whole numbers, masked modulo 2^width, with shares of the seeds of its masks."""
        place, context = self.place(roster), roster.context
        self.once(roster.round, "upload", context + numbers.astype("<i8").tobytes())
        secrets = {other: agreed(self.key, roster.key(other)) for other in roster.holders(place)}
        seeds = [derived(self.private, context, "own", size=SEED)]
        total = numbers + mask(seeds[0], numbers.size, width)
        for other in roster.others(place):
            pair = min(place, other), max(place, other)  # both find the same seed
            seeds.append(derived(secrets[other], context, "pair", *pair, size=SEED))
            total = total + signed(place, other) * mask(seeds[-1], numbers.size, width).astype(np.int64)
        joined, holders, implied = b"".join(seeds), roster.holders(place), roster.threshold - 1
        points = {0: joined} | {
            x: _implied(secrets[holder], context, place, holder, len(joined))
            for x, holder in enumerate(holders[:implied], 1)
        }
        bundles = [
            sealed(derived(secrets[holder], context, "bundle", place, holder), share(points, x))
            for x, holder in enumerate(holders[implied:], implied + 1)
        ]
        wrapped = (total & ((1 << width) - 1)).astype(np.uint32)
        rows = np.frombuffer(b"".join(bundles), np.uint8).reshape(len(bundles), -1)
        return Masked(run, roster.round, self.number, width, wrapped, rows)

    def noise(self, roster: MaskRoster, variance: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Make a client's share of a round's noise on its numbers, the same again for the same round and numbers.

        Another draw for the same numbers would let a server take the mean of both, the same one for others their
        difference.
        """
        made_of = hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
        return discrete_gaussian(variance, numbers.size, derived(self.private, roster.context, "noise", made_of))

    def shares(self, request: Survivors, roster: MaskRoster) -> Shares:
        """The shares that take the masks off a round's sum, one client after another, in order.

        For each client that is there: the share of its own mask's seed, and those of the masks that it shares with
        clients that are not there. Nothing else of a share leaves this client.
        """
        place, context = self.place(roster), roster.context
        there = np.flatnonzero(request.there).tolist()
        if place not in there:
            raise FedKSeedError(f"client {self.number} is asked for shares of a round that goes on without it")
        senders = [sender for sender in roster.holders(place) if sender in there]
        roster.require_readable(there, senders)
        self.once(roster.round, "set of survivors", context + request.there.tobytes())
        sealing = sent_to(roster, place, there)
        if len(sealing) != len(request.bundles):
            raise FedKSeedError(f"{len(sealing)} clients made bundles for this one, got {len(request.bundles)}")
        bundles = dict(zip(sealing, request.bundles, strict=True))
        shares = []
        for sender in senders:
            secret, others = agreed(self.key, roster.key(sender)), roster.others(sender)
            if sender in bundles:
                whole = opened(derived(secret, context, "bundle", sender, place), bundles[sender].tobytes())
            else:
                whole = _implied(secret, context, sender, place, SEED * (1 + len(others)))
            asked = [0, *(1 + k for k, other in enumerate(others) if not request.there[other])]
            shares += [whole[k * SEED : (k + 1) * SEED] for k in asked]
        return Shares(request.run, request.round, self.number, b"".join(shares))


def sent_to(roster: MaskRoster, holder: int, there: Collection[int]) -> list[int]:
    """Places of the clients that are there and have sealed a share for a holder, in their order."""
    return [sender for sender in sorted(there) if holder in roster.sealed_for(sender)]


def _implied(secret: bytes, context: bytes, sender: int, holder: int, size: int) -> bytes:
    """The share of a holder to which none is sent: both sides find it."""
    stream = Cipher(ChaCha20(derived(secret, context, "share", sender, holder), bytes(16)), None).encryptor()
    return stream.update(bytes(size))
