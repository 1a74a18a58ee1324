"""Factors of a model's tensors: the part of a factored pool's directions that depends on the model, not on the key.

A factored family sees a tensor as a matrix W (o × i): its first dimension by all others; a vector is one column. Its
directions are outer products z = u vᵀ, so that a sum of them is U C Vᵀ, and is added to a layer's output without making
a weight: y = W x + U (C (Vᵀ x)).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError

MOST_RANK = 1024  # of one tensor


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor as a matrix of rows and columns."""

    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Matrix":
        """The matrix that a tensor of this shape is."""
        return cls(shape[0] if shape else 1, prod(shape[1:]))

    def rows_of(self, start: int, stop: int) -> range:
        """The rows that positions start ≤ p < stop lie in, cut or whole."""
        return range(start // self.columns, -(-stop // self.columns))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Factor(Matrix):
    """One tensor's factors U = left · left_scale (o × r_u) and V = right · right_scale (i × r_v).

    Direction first + a r_v + b is z = u_a v_bᵀ in this tensor, and 0 in all others.
    """

    first: int  # the number of its first direction
    left: NDArray[np.int8]  # (o, r_u)
    right: NDArray[np.int8]  # (i, r_v)
    left_scale: NDArray[np.float32]  # (r_u,)
    right_scale: NDArray[np.float32]  # (r_v,)

    def __post_init__(self) -> None:
        ranks = self.left.shape[1:] + self.right.shape[1:]
        fits = (self.left.shape, self.right.shape) == ((self.rows, *ranks[:1]), (self.columns, *ranks[1:]))
        if not fits or not all(1 <= rank <= MOST_RANK for rank in ranks):
            raise FedKSeedError(
                f"factors of a {self.rows} x {self.columns} matrix have these rows and 1 to {MOST_RANK} columns, "
                f"got {self.left.shape} and {self.right.shape}"
            )
        for scale, rank in zip((self.left_scale, self.right_scale), ranks, strict=True):
            if scale.shape != (rank,) or not (np.isfinite(scale) & (scale > 0)).all():
                raise FedKSeedError(f"each of a factor's {rank} columns has a positive finite scale, got {scale}")

    def __eq__(self, other: object) -> bool:
        return self is other  # two of one shape are two

    __hash__ = object.__hash__

    @property
    def ranks(self) -> tuple[int, int]:
        """r_u and r_v."""
        return self.left.shape[1], self.right.shape[1]

    @property
    def directions(self) -> slice:
        """The places of its coefficients in c."""
        return slice(self.first, self.first + prod(self.ranks))

    def core(self, c: NDArray[np.float32]) -> NDArray[np.float32]:
        """The matrix C of its coefficients times both scales, (r_u, r_v): two rounded products."""
        return (c[self.directions].reshape(self.ranks) * self.left_scale[:, None]) * self.right_scale


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """Factors of a model's tensors by their names.

    Args:
        factors: by name, in the order of names by code point; their directions follow one another from 0.
        about: where it comes from: plain JSON.
    """

    factors: Mapping[str, Factor]
    about: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        end = 0
        if not self.factors or list(self.factors) != sorted(self.factors):
            raise FedKSeedError("a basis has factors of at least one tensor, in the order of the tensors' names")
        for name, factor in self.factors.items():
            if not name or " " in name or not name.isprintable():  # else two bases could have one digest
                raise FedKSeedError(f"a tensor's name is printable and has no spaces, got {name[:80]!r}")
            if factor.first != end:
                raise FedKSeedError(f"the directions of {name} begin at {end}, got {factor.first}")
            end = factor.directions.stop

    @property
    def size(self) -> int:
        """The number of its directions."""
        return max(factor.directions.stop for factor in self.factors.values())

    def digest(self) -> bytes:
        """The SHA-256 of everything that directions depend on: names, shapes, factors and scales."""
        sha = hashlib.sha256()
        for name, factor in self.factors.items():
            sha.update(f"{name} {factor.rows} {factor.columns} {factor.ranks[0]} {factor.ranks[1]}\n".encode())
            for part in (factor.left, factor.right, factor.left_scale, factor.right_scale):
                sha.update(np.ascontiguousarray(part, "i1" if part.ndim == 2 else "<f4").tobytes())
        return sha.digest()

    def __iter__(self) -> Iterator[tuple[str, Factor]]:
        return iter(self.factors.items())
