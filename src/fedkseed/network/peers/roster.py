"""The file that all peers of a run have: who takes part, and when rounds open.

    start = 2030-01-31T12:00:00Z    # the first round opens
    seconds = 600                   # and each later one this much after the one before

    [[peers]]
    key = "ecdsa-sha2-nistp256 AAAA…"            # a line of `fedkseed certs members`
    address = "https://peer0.example.org:8443"   # absent: nobody can dial it, it dials others

The first peer has the number 0. Keys and times belong to the run; addresses may change while it goes on.
"""

import math
import re
import time
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from pydantic import AwareDatetime, Field, field_validator

from ...errors import FedKSeedError
from ...files import stamp
from ...recipe.reading import from_file, typed
from ...recipe.schema import Positive, Table
from ..protocol.signatures import fingerprint, public_key

ADDRESS = re.compile(r"https://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?/?")


class ListedPeer(Table):
    """One peer: its public key in OpenSSH's format, and where others reach it."""

    key: str
    address: str | None = None

    @field_validator("address")
    @classmethod
    def _dialled(cls, value: str | None) -> str | None:
        if value is not None and not ADDRESS.fullmatch(value):
            raise ValueError(f"a peer's address is https://HOST:PORT, got {value!r}")
        return value if value is None else value.rstrip("/")


class Roster(Table):
    """The peers of a run in the order of their numbers, and the times of its rounds."""

    start: AwareDatetime
    seconds: Positive
    max_staleness: Annotated[int, Field(ge=0, le=100)] = 1  # rounds by which an upload may be late
    staleness_power: Annotated[float, Field(ge=0, le=16)] = 0.5  # one that is s rounds late counts (1 + s)^-power
    peers: Annotated[list[ListedPeer], Field(min_length=2, max_length=200)]

    def public_keys(self) -> tuple[EllipticCurvePublicKey, ...]:
        """The public keys of peers 0, 1, ….

        Raises:
            FedKSeedError: one is no key on P-256, or two are the same.
        """
        keys = tuple(public_key(peer.key.encode(), f"the key of peer {k}") for k, peer in enumerate(self.peers))
        names = [fingerprint(key) for key in keys]
        for number, name in enumerate(names):
            if (first := names.index(name)) < number:
                raise FedKSeedError(f"peers {first} and {number} have one key; each needs its own")
        return keys

    def facts(self) -> dict[str, object]:
        """All that peers must agree on: everything but the addresses."""
        times = self.model_dump(include={"seconds", "max_staleness", "staleness_power"})
        peers = [fingerprint(key).hex() for key in self.public_keys()]
        return times | {"start": self.start.astimezone(UTC).isoformat(), "peers": peers}

    def opens_at(self, round_: int) -> float:
        """The moment at which a round opens, in seconds since 1970."""
        return self.start.timestamp() + round_ * self.seconds

    def open_round(self) -> int:
        """The round that is open by this machine's clock; negative before the first."""
        return math.floor((time.time() - self.start.timestamp()) / self.seconds)


def load_roster(path: Path) -> Roster:
    """Read a roster.

    Raises:
        FedKSeedError: the file is missing, is no TOML, has an unknown key or a value that is not allowed.
    """

    def roster(table: dict[str, Any]) -> Roster:
        listed = typed(Roster, table)
        listed.public_keys()
        return listed

    return from_file(path, "the peers' file", roster)


class PeerAddresses:
    """The addresses in a roster's file as they are now; it may be edited while the run goes on."""

    def __init__(self, path: Path, roster: Roster, note: Callable[[str], object]) -> None:
        self.path, self.roster, self.note = path, roster, note
        self._seen = stamp(path)

    def current(self) -> dict[int, str]:
        """Number of a peer -> its address, for those that can be dialled."""
        if (now := stamp(self.path)) != self._seen:
            self._seen = now
            try:
                roster = load_roster(self.path)
                if roster.facts() != self.roster.facts():
                    raise FedKSeedError(f"{self.path} has other keys or times than the run began with: another run")
                self.roster = roster
            except FedKSeedError as error:  # half written, too: it is read again when it is whole
                self.note(f"the peers' addresses stay as they were: {error}")
        return {number: peer.address for number, peer in enumerate(self.roster.peers) if peer.address}
