"""A pool of K directions that every party can generate from one 64-bit key.

Every value z_j[p] is a pure function of (key, family, tensor, position p, direction j): see
docs/directions.md for the specification, `families.py` for the families and `reference.py` for their definition in
NumPy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError, require_choice
from .factors import Basis, Matrix
from .families import FAMILIES, Family
from .reference import BLOCK

MAX_TRANSFORMED = 1 << 20  # one block is held in cache: 4 MiB of float32
MAX_POSITIONS = 1 << 34  # of one tensor: a 32-bit counter times the four words of a Philox call

Integers: TypeAlias = Sequence[int] | NDArray[np.integer]
Numbers: TypeAlias = Sequence[float] | NDArray[np.floating]
Terms: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.float32]]  # directions, ascending, and their coefficients


@dataclass(frozen=True, slots=True)
class Pool:
    """The directions z_0 … z_{K-1} of one run.

    Args:
        key: 64-bit key of the random bits.
        size: K, the number of directions; for transformed families (`hadamard`, `hashed`) a power of two up to
            2^20, for the others anything up to 2^32 (unlimited seeds are the same code).
        family: the name of one of FAMILIES.
        basis: SHA-256 of the basis that the family `informed` takes its directions from; empty for others.
        tensors: for factored families, the tensors of the model by their numbers, see `fitted`.

    Raises:
        FedKSeedError: a value is out of range.
    """

    key: int
    size: int
    family: str = "hadamard"
    basis: bytes = b""
    tensors: Mapping[int, Matrix] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_choice("family of directions", self.family, [*FAMILIES])
        if not 0 <= self.key < 1 << 64:
            raise FedKSeedError(f"a pool's key is a 64-bit number (0 to {(1 << 64) - 1}), got {self.key}")
        most = MAX_TRANSFORMED if self.transformed or self.factored else 1 << 32
        if not 1 <= self.size <= most:
            raise FedKSeedError(f"a {self.family} pool holds 1 to {most} directions, got {self.size}")
        if self.transformed and self.size & (self.size - 1):
            raise FedKSeedError(
                f"a {self.family} pool needs a power of two as its size K, got {self.size}; "
                f"the next one is {1 << self.size.bit_length()}"
            )
        power_of = self.record.power_of
        if (self.size & (self.size - 1) and power_of > 1) or (power_of == 4 and self.size.bit_length() % 2 == 0):
            power = "four, as 256, 1024 or 4096" if power_of == 4 else "two"
            raise FedKSeedError(f"a {self.family} pool's size K is a power of {power}, got {self.size}")
        if len(self.basis) != (32 if self.informed else 0):
            raise FedKSeedError(
                f"a {self.family} pool is named by {'the SHA-256 of its basis' if self.informed else 'no basis'}, "
                f"got {len(self.basis)} bytes"
            )

    def __repr__(self) -> str:
        """The pool's arguments; runs keep this text, so that of a pool without a basis never changes."""
        basis = f", basis={self.basis.hex()}" if self.basis else ""
        return f"Pool(key={self.key}, size={self.size}, family={self.family!r}{basis})"

    @property
    def record(self) -> Family:
        """The record of the pool's family."""
        return FAMILIES[self.family]

    @property
    def transformed(self) -> bool:
        """Whether the sum over all directions is one Walsh–Hadamard transform."""
        return self.record.transform is not None

    @property
    def factored(self) -> bool:
        """Whether directions are outer products of factors, so that they depend on the shapes of tensors."""
        return self.record.factored is not None

    @property
    def informed(self) -> bool:
        """Whether a basis has the factors."""
        return self.record.informed

    def fitted(self, shapes: Mapping[str, Sequence[int]], basis: Basis | None = None) -> "Pool":
        """The pool with the tensors of a model, which the directions of a factored family depend on.

        Args:
            shapes: the shape of every tensor by name, in the order of the layout.
            basis: the factors, for the family `informed`.

        Raises:
            FedKSeedError: the basis is missing, another one, or of another model.
        """
        if not self.factored:
            return self
        if not self.informed:
            return replace(self, tensors={k: Matrix.of(shape) for k, shape in enumerate(shapes.values())})
        if basis is None:
            raise FedKSeedError(f"a pool of the family {self.family} needs its basis: set [directions] basis")
        if (digest := basis.digest()) != self.basis:
            raise FedKSeedError(f"the basis has digest {digest.hex()}, the run's is {self.basis.hex()}; get that file")
        if basis.size > self.size:
            raise FedKSeedError(f"the basis has {basis.size} directions, the pool only {self.size}; set size to it")
        numbers, factors = {name: k for k, name in enumerate(shapes)}, dict[int, Matrix]()
        for name, factor in basis:
            got = Matrix.of(shapes[name]) if name in shapes else None
            if got != Matrix(factor.rows, factor.columns):
                raise FedKSeedError(
                    f"the basis was made for a model whose {name} is {factor.rows} x {factor.columns}, this one has "
                    f"{'none' if got is None else f'{got.rows} x {got.columns}'}; make one: fedkseed basis"
                )
            factors[numbers[name]] = factor
        return replace(self, tensors=factors)

    def matrix(self, tensor: int) -> Matrix | None:
        """A tensor as a factored family sees it; None: no direction touches it.

        Raises:
            FedKSeedError: the pool was not fitted to a model.
        """
        if self.tensors is None:
            raise FedKSeedError(f"{self.family} directions depend on the shapes of tensors; call Pool.fitted first")
        return self.tensors.get(tensor)

    @property
    def key_words(self) -> tuple[int, int]:
        """The key as Philox takes it: low 32 bits, high 32 bits."""
        return self.key & 0xFFFFFFFF, self.key >> 32

    @property
    def unit(self) -> int:
        """The number of positions made together: a whole number of blocks of bits and of transforms."""
        return max(BLOCK, self.size) if self.transformed else BLOCK

    def select(self, directions: Integers, coefficients: Numbers) -> Terms:
        """Check a sparse set of coefficients and return it without its zeros.

        The order of a sum is part of its value, so directions must ascend. Leaving a zero out
        changes no bit: s + 0 z is s, for the sums that occur (they start from +0 and are never −0).

        Raises:
            FedKSeedError: a direction is outside the pool, out of order or twice, or a coefficient
                is not a finite float32.
        """
        wide = np.asarray(directions, dtype=np.int64).reshape(-1)
        with np.errstate(over="ignore"):
            values = np.asarray(coefficients, dtype=np.float32).reshape(-1)
        if wide.shape != values.shape:
            raise FedKSeedError(f"got {wide.size} directions and {values.size} coefficients; each direction needs one")
        if wide.size and not (wide.min() >= 0 and wide.max() < self.size):
            raise FedKSeedError(f"directions must lie in 0 to {self.size - 1}, got {wide.min()} to {wide.max()}")
        if np.any(np.diff(wide) <= 0):
            raise FedKSeedError("directions must be ascending, each once: the order of a sum is part of its value")
        if not np.all(np.isfinite(values)):
            raise FedKSeedError(f"coefficients must be finite float32 numbers, got {values[~np.isfinite(values)][0]}")
        kept = values != 0
        return wide[kept].astype(np.uint32), values[kept]

    def dense(self, coefficients: Numbers) -> Terms:
        """The non-zero coefficients of a whole vector c of shape (K,), checked and returned as by `select`."""
        values = np.asarray(coefficients).reshape(-1)
        if values.size != self.size:
            raise FedKSeedError(f"the pool has {self.size} directions, got {values.size} coefficients")
        return self.select(np.arange(self.size), values)
