"""Records that cross the network. Each checks itself when made, so that a decoded record is sound.

Whether its whole numbers fit the bits of their fields is checked when it is encoded.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..directions import Pool
from ..errors import FedKSeedError, require_choice
from .numbers import MAX_SCALARS, WIRES, require_rounded, rounded

MAX_BROADCAST = 1 << 20  # coefficients; a pool of unlimited seeds can't be broadcast
MAX_MEMBERS = (1 << 16) - 1  # clients of a round with masks
KEY = 32  # bytes of an X25519 key
WIDEST = 32  # bits of a masked number


@dataclass(frozen=True, slots=True)
class Run:
    """The run that a message belongs to: both sides must hold the same directions and the same w_0."""

    pool: Pool
    base: bytes  # SHA-256 of w_0, see `Layout.digest`

    def __post_init__(self) -> None:
        if len(self.base) != 32:
            raise FedKSeedError(f"a base model's digest has 32 bytes, got {len(self.base)}")

    def require(self, other: "Run") -> None:
        """Refuse a message of another run: the pool or the base model differs."""
        if other.pool.family == self.pool.family and other.pool.basis != self.pool.basis:
            raise FedKSeedError(
                f"the message is for the basis {other.pool.basis.hex()}, this party has {self.pool.basis.hex()}; use "
                "the same file on both sides"
            )
        if other.pool != self.pool:
            raise FedKSeedError(f"the message is for {other.pool}, this party has {self.pool}; use the same recipe")
        if other.base != self.base:
            raise FedKSeedError(
                f"the message is for a base model with digest {other.base.hex()}, this party's has {self.base.hex()}; "
                "load the same weights, in the same type, on both sides"
            )


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Message to a client: the coefficients of the model, and the settings of this round's local steps."""

    run: Run
    round: int  # from 0
    lr: float  # η of this round
    eps: float  # ε
    steps: int  # τ
    clip: float  # largest |ρ| that a client may report; infinite for none
    coefficients: NDArray[np.float32]  # (K,), c
    probes: int = 1  # P, directions a step
    probabilities: NDArray[np.float32] | None = None  # (K,), FedKSeed-Pro: relative weights of the directions
    wire: str = "exact"  # the precision of c, of the probabilities and of the uploads' scalars, see numbers.py

    def __post_init__(self) -> None:
        size = self.run.pool.size
        if size > MAX_BROADCAST:
            raise FedKSeedError(f"a broadcast carries at most {MAX_BROADCAST} coefficients, the pool has {size}")
        if not self.clip > 0:
            raise FedKSeedError(f"a broadcast's clip must be a positive number, got {self.clip}")
        _require_positive(lr=self.lr, eps=self.eps)
        if not (self.steps >= 1 and self.probes >= 1 and self.steps * self.probes <= MAX_SCALARS):
            got = f"{self.steps} steps of {self.probes}"
            raise FedKSeedError(f"a broadcast asks for at least one step, at most {MAX_SCALARS} directions; got {got}")
        if self.coefficients.size != size:
            raise FedKSeedError(f"a broadcast holds {size} coefficients, got {self.coefficients.size}")
        _require_numbers(self.coefficients, "coefficients")
        p = self.probabilities
        if p is not None and (p.shape != (size,) or not np.all(np.isfinite(p)) or p.min() < 0 or not p.any()):
            raise FedKSeedError(f"a broadcast holds {size} probabilities of at least 0, got {_describe(p)}")
        _require_wire(self.wire, WIRES, self.coefficients, *([] if p is None else [p]))


@dataclass(frozen=True, slots=True)
class Upload:
    """Message to the server: the scalar gradient of every probe. Both sides know the directions: `draw_directions`."""

    run: Run
    round: int
    client: int
    examples: int  # its weight in the aggregation
    loss: float  # mean local loss, for monitoring only
    scalars: NDArray[np.float32]  # (τ P,), ρ; NaN where a probe moved nothing
    wire: str = "exact"  # the precision in which they travel, see numbers.py

    def __post_init__(self) -> None:
        _require_examples(self.examples)
        if self.scalars.size > MAX_SCALARS:
            raise FedKSeedError(f"an upload has at most {MAX_SCALARS:,} scalar gradients, got {self.scalars.size:,}")
        _require_wire(self.wire, WIRES)
        require_rounded(self.scalars, self.wire)

    @property
    def found(self) -> NDArray[np.bool_]:
        """Whether each probe moved the model, shape (τ P,)."""
        return ~np.isnan(self.scalars)

    @property
    def skipped(self) -> int:
        """The number of probes that moved nothing."""
        return int(np.isnan(self.scalars).sum())


@dataclass(frozen=True, slots=True)
class Values:
    """Message to a client: all tuned weights, for algorithms that send them."""

    run: Run
    round: int
    lr: float
    values: NDArray[np.float32]  # (d,), tensor after tensor in layout order

    def __post_init__(self) -> None:
        _require_positive(lr=self.lr)
        _require_numbers(self.values, "weights")


@dataclass(frozen=True, slots=True)
class History:
    """Message to a client: the coefficients that moved the model in the rounds that the client has missed.

    In a round, tensors have `counts` numbers each, or there is one count for all of them together. The
    numbers belong to the `directions` named, or, if none are named, to those that the round implies.
    """

    run: Run
    round: int
    lr: float
    since: int  # number of rounds in the model that the client holds
    counts: NDArray[np.uint32]  # (round − since, 1 or tensors)
    directions: NDArray[np.uint32]  # (n,) or empty, round after round, ascending in each
    coefficients: NDArray[np.float32]  # (n,), n = Σ counts

    def __post_init__(self) -> None:
        _require_positive(lr=self.lr)
        if not 0 <= self.since <= self.round:
            raise FedKSeedError(f"a history before round {self.round} begins in 0 to {self.round}, got {self.since}")
        if self.counts.ndim != 2 or len(self.counts) != self.round - self.since or not self.counts.shape[1]:
            raise FedKSeedError(f"a history has {self.round - self.since} rows of counts, got {self.counts.shape}")
        _require_numbers(self.coefficients, "coefficients")
        total = int(self.counts.sum(dtype=np.uint64))
        if total != self.coefficients.size or self.directions.size not in (0, total):
            raise FedKSeedError(
                f"a history's counts add up to {total}, it has {self.coefficients.size} coefficients "
                f"and {self.directions.size} directions"
            )
        if self.directions.size and int(self.directions.max()) >= self.run.pool.size:
            raise FedKSeedError(f"a history's directions lie below {self.run.pool.size}, got {self.directions.max()}")


@dataclass(frozen=True, slots=True)
class Change:
    """Message to the server: weights, or numbers along directions that both sides know."""

    run: Run
    round: int
    client: int
    examples: int
    loss: float  # mean local loss, for monitoring only
    skipped: int  # steps left out because their loss was not finite
    values: NDArray[np.float32]  # (n,)
    # Number of values of each tensor; empty: one run for all tensors.
    counts: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    wire: str = "exact"  # or compact: the precision in which they travel

    def __post_init__(self) -> None:
        _require_examples(self.examples)
        _require_numbers(self.values, "numbers")
        if self.counts.size and int(self.counts.sum(dtype=np.uint64)) != self.values.size:
            raise FedKSeedError(f"an upload's counts add up to {self.counts.sum()}, it has {self.values.size} numbers")
        _require_wire(self.wire, WIRES[:2], self.values)


@dataclass(frozen=True, slots=True)
class Subtotal:
    """Message to a server from a shard, which is its client: the sum of a round's uploads that the shard has got.

    Numbers are the integers of strategies/sums.py, so that subtotals add up to the sum of one server.
    """

    run: Run
    round: int
    client: int  # number of the shard
    clients: NDArray[np.uint32]  # (n,), whose uploads are in the sum, ascending
    weight: int  # Σ w of these clients
    loss: float  # median of their mean local losses, for monitoring only
    skipped: int  # probes left out by all of them
    values: NDArray[np.int64]  # (K,), Σ w q
    sizes: NDArray[np.int64]  # (K,), Σ |ρ| in units of GRID
    counts: NDArray[np.uint32]  # (K,), how often each direction was drawn

    def __post_init__(self) -> None:
        n, size = self.clients.size, self.run.pool.size
        if (self.clients[1:] <= self.clients[:-1]).any():
            raise FedKSeedError(f"a subtotal has each client once and in order, got {self.clients.tolist()[:10]}")
        if not n <= self.weight < 1 << 32 or (n == 0 and self.weight):
            raise FedKSeedError(f"a subtotal's {n} clients weigh at least 1 each, 2^32 - 1 in all, got {self.weight}")
        for name in ("values", "sizes", "counts"):
            if (numbers := getattr(self, name)).shape != (size,):
                raise FedKSeedError(f"a subtotal has {size} {name}, got {numbers.shape}")
            if n == 0 and numbers.any():
                raise FedKSeedError(f"a subtotal of no clients has {name} of 0, got {np.count_nonzero(numbers)} others")
        if self.sizes.min() < 0:
            raise FedKSeedError(f"sums of sizes are at least 0, got {self.sizes.min()}")


@dataclass(frozen=True, slots=True)
class Delta:
    """Message to a client: another message, as the difference to one that the client has kept, see delta.py."""

    run: Run
    round: int
    kept: int  # CRC-32 of the message that the client has kept, its last four bytes
    whole: int  # CRC-32 of the restored message
    difference: bytes  # of the two bodies, byte by byte, modulo 256; raw DEFLATE


@dataclass(frozen=True, slots=True)
class Lack:
    """Message to the server: a client lacks the message to which a `Delta` refers, and asks for the whole one."""

    run: Run
    round: int
    client: int


@dataclass(frozen=True, slots=True)
class Secured:
    """Message to a client whose upload is to be masked: the broadcast, and the clients of the round with their keys."""

    run: Run
    round: int
    members: NDArray[np.uint32]  # (n,), the round's clients, ascending
    keys: NDArray[np.uint8]  # (n, 32), their X25519 public keys
    broadcast: bytes  # an encoded `Broadcast`

    def __post_init__(self) -> None:
        _require_roster(self.members, self.keys)


@dataclass(frozen=True, slots=True)
class Masked:
    """Message to the server: numbers under masks, and shares of the seeds of these masks, for holders each."""

    run: Run
    round: int
    client: int
    width: int  # bits of a number: masked ones are whole numbers modulo 2^width
    numbers: NDArray[np.uint32]  # (m,)
    bundles: NDArray[np.uint8]  # (h, bytes): what each of some holders alone can open

    def __post_init__(self) -> None:
        if not 2 <= self.width <= WIDEST or self.numbers.ndim != 1 or not 0 < self.numbers.size <= MAX_BROADCAST:
            raise FedKSeedError(
                f"a masked upload has 1 to {MAX_BROADCAST:,} numbers of 2 to {WIDEST} bits, got {self.numbers.shape} "
                f"of {self.width}"
            )
        if int(self.numbers.max()) >> self.width:
            raise FedKSeedError(f"masked numbers of {self.width} bits, got {self.numbers.max()}")


@dataclass(frozen=True, slots=True)
class Survivors:
    """Message to a client: whose masked uploads have come, and the bundles that these clients made for it."""

    run: Run
    round: int
    members: NDArray[np.uint32]  # (n,) as in the round's `Secured`
    keys: NDArray[np.uint8]  # (n, 32)
    broadcast: bytes  # SHA-256 of the round's encoded broadcast
    there: NDArray[np.bool_]  # (n,): whether each member's upload has come
    bundles: NDArray[np.uint8]  # (m, bytes), in the order of the members that made them

    def __post_init__(self) -> None:
        _require_roster(self.members, self.keys)
        if self.there.shape != self.members.shape or len(self.broadcast) != 32:
            raise FedKSeedError(
                f"of {self.members.size} clients each is there or not, and a digest has 32 bytes; got "
                f"{self.there.size} and {len(self.broadcast)}"
            )


@dataclass(frozen=True, slots=True)
class Shares:
    """Message to the server: a client's shares of the seeds of masks that are to be taken off a round's sum."""

    run: Run
    round: int
    client: int
    data: bytes


def _require_roster(members: NDArray[np.uint32], keys: NDArray[np.uint8]) -> None:
    if not 3 <= members.size <= MAX_MEMBERS or (members[1:] <= members[:-1]).any():
        raise FedKSeedError(
            f"a round with masks has 3 to {MAX_MEMBERS:,} clients, each once and in order: with two, each learns the "
            f"other's numbers from the sum; got {members.tolist()[:10]}"
        )
    if keys.shape != (members.size, KEY):
        raise FedKSeedError(f"each of {members.size} clients has a public key of {KEY} bytes, got {keys.shape}")


def _require_examples(examples: int) -> None:
    if examples < 1:
        raise FedKSeedError(f"an upload stands for at least one example, got {examples}")


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (np.isfinite(number) and number > 0):
            raise FedKSeedError(f"a broadcast's {name} must be a positive number, got {number}")


def _require_numbers(values: NDArray, what: str) -> None:
    if values.dtype != np.float32 or values.ndim != 1 or not np.isfinite(values).all():
        raise FedKSeedError(f"a message's {what} must be finite float32 numbers, got {_describe(values)}")


def _require_wire(wire: str, known: tuple[str, ...], *numbers: NDArray[np.float32]) -> None:
    require_choice("wire of this message", wire, known)
    if wire != "exact" and not all(np.array_equal(rounded(values, wire), values) for values in numbers):
        raise FedKSeedError("numbers that travel compact must be rounded by compact() first: both sides use the same")


def _describe(values: NDArray[np.floating]) -> str:
    broken = int(np.sum(~np.isfinite(values)))
    return f"{values.size} of which {broken} are NaN or infinite" if broken else f"{values.size}"
