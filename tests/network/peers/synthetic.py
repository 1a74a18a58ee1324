"""Sets without a model, in milliseconds: a real rule and real keys, and uploads of seeded random scalars."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from tomllib import loads

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedkseed.network.peers.merge_rule import MergeRule
from fedkseed.network.peers.roster import ListedPeer, Roster
from fedkseed.network.peers.signed_upload import SignedUpload
from fedkseed.network.protocol.signatures import sign
from fedkseed.recipe.reading import parse
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.wire.codec import encode
from fedkseed.wire.records import Run

PEERS, ROUNDS, LATE = 5, 4, 1
BASE = bytes(range(32))
RECIPE = f"""
seed = 7
[model]
name = "none"
[clients]
split = "files"
cohort = {PEERS}
[directions]
size = 32
[training]
algorithm = "fedkseed"
rounds = {ROUNDS}
steps = 8
lr = 0.01
eps = 0.001
clip = 100.0
"""
TRUST = '[trust]\nrule = "clipped"\nagreement = true\nmost_examples = 1\n'


@cache
def secret(number: int) -> ec.EllipticCurvePrivateKey:
    """The key of a peer: the same in each test."""
    return ec.derive_private_key(1000 + number, ec.SECP256R1())


def line(number: int) -> str:
    """The public line of a peer's key."""
    form = serialization.PublicFormat.OpenSSH
    return secret(number).public_key().public_bytes(serialization.Encoding.OpenSSH, form).decode()


def roster(**changes: object) -> Roster:
    defaults = Roster(
        start=datetime(2026, 1, 1, tzinfo=UTC), seconds=60.0, max_staleness=LATE,
        peers=[ListedPeer(key=line(number)) for number in range(PEERS)],
    )  # fmt: skip
    return defaults.model_copy(update=changes)


@dataclass(frozen=True)
class Federation:
    """A rule, and entries that its peers could have made."""

    rule: MergeRule

    @classmethod
    def of(cls, text: str = RECIPE + TRUST, **changes: object) -> "Federation":
        recipe = parse(loads(text))
        algorithm = checked_algorithm(recipe)
        strategy = algorithm.make(recipe, Run(algorithm.pool(recipe), BASE))
        return cls(MergeRule.of(text.encode(), recipe, strategy, roster(**changes)))

    def entry(
        self, client: int, round_: int, *, late: int = 0, draw: int = 0, signer: int | None = None
    ) -> SignedUpload:
        """An upload of seeded random scalars; another `draw` is another upload."""
        rng = np.random.default_rng([client, round_, draw])
        differentiates = self.rule.strategy.settings.derivatives is not None and client % 2 == 1
        upload = encode(self.rule.strategy.client.example(round_, client, 10 + client, differentiates, rng))
        unsigned = SignedUpload(round_ + late, bytes([draw]) * 32, upload)
        key = secret(client if signer is None else signer)
        return replace(unsigned, signature=sign(key, unsigned.statement(self.rule.run)))

    def everything(self) -> list[bytes]:
        """An upload of each peer and round; each fifth is late, and one peer contradicts itself twice."""
        places = [(client, round_) for round_ in range(ROUNDS) for client in range(PEERS)]
        late = {place for k, place in enumerate(places) if k % 5 == 3 and place[1] + LATE < ROUNDS}
        made = [self.entry(client, round_, late=(client, round_) in late) for client, round_ in places]
        made += [self.entry(2, 1, draw=k) for k in (1, 2, 3)] + [self.entry(4, 0, late=1, draw=1)]
        return [one.encoded for one in made]
