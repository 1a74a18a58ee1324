"""Families of directions: the name of each, its number on the wire, and its definition.

A new family is a function in `reference.py`, a record here, and kernels in those backends that should be fast with it.
Without kernels its directions are made by the definition, slowly. A program adds its own family with `add_family`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import FedKSeedError
from . import reference


class Sums(NamedTuple):
    """The definition of all directions of a family together, over whole blocks of K positions or rows of a tensor.

    Args:
        total: maps (pool, c, tensor, positions), c of shape (K,), to Σ_j c_j z_j at these positions; for factored
            families (pool, core, tensor, rows, matrix, sums) to sums + Σ_j c_j z_j, (rows, columns).
        products: maps (pool, v, tensor, positions) to the K inner products of every block, (blocks, K); for factored
            families (pool, v, tensor, rows, matrix), v of shape (rows, columns), to the K inner products with the rows.
    """

    total: Callable[..., Any]
    products: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Family:
    """One family: a way to make directions.

    Args:
        name: the name in recipes and adapters.
        number: the number on the wire, 0 to 255. It never changes.
        elements: maps (pool, direction j, tensor, start, stop) to z_j at positions start ≤ p < stop, float32. They
            depend on the pool's key and these numbers alone, wherever a tensor is cut. Its random bits come from
            `reference.philox` or `reference.signs` with streams of its own; a program's family takes them from 256 on.
        transform: the sums of a family whose sum over all directions is one Walsh–Hadamard transform, and whose K is a
            power of two; None for other families.
        factored: the sums of a family whose directions are outer products; None for other families.
        at_end: whether the inner products are the transform of the sum of a segment's products.
        core: maps c to the numbers that the sums of a factored family are made from: C in its order, or M.
        power_of: a number that the size K of a factored family is a power of; 1: K is any number.
        informed: whether a basis has the factors.

    Raises:
        FedKSeedError: the name or the number is not allowed.
    """

    name: str
    number: int
    elements: Callable[..., reference.Floats]
    transform: Sums | None = None
    factored: Sums | None = None
    at_end: bool = False
    core: Callable[[reference.Floats], reference.Floats] = lambda c: c
    power_of: int = 1
    informed: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise FedKSeedError(f"a family's name is a word of letters, digits and _, got {self.name!r}")
        if not 0 <= self.number <= 255:
            raise FedKSeedError(f"a family's number on the wire is 0 to 255, got {self.number}")


FAMILIES: dict[str, Family] = {}  # by name


def add_family(family: Family) -> Family:
    """Register a family in this process, for pools, recipes, adapters and the wire.

    Every party of a run has to register the same one.

    Raises:
        FedKSeedError: another family has this name or number.
    """
    for other in FAMILIES.values():
        if other.name == family.name or other.number == family.number:
            raise FedKSeedError(
                f"family {other.name!r} has number {other.number}; "
                f"{family.name!r} with number {family.number} needs a name and a number of its own"
            )
    FAMILIES[family.name] = family
    return family


def numbered(number: int) -> Family:
    """The family with the given number on the wire.

    Raises:
        FedKSeedError: no family has this number.
    """
    for family in FAMILIES.values():
        if family.number == number:
            return family
    numbered = ", ".join(f"{family.number} {family.name}" for family in FAMILIES.values())
    raise FedKSeedError(f"the message names direction family number {number}; this program knows {numbered}")


_of_factors = Sums(reference.informed_total, reference.informed_products)
# the same for mixtures z'_j = Σ_k H[k, j] z_k
_mixed = Sums(reference.informed_total, lambda *place: reference.transform(reference.informed_products(*place)))
_tiled = Sums(reference.separable_total, reference.separable_products)
for _family in (
    Family("gaussian", 0, reference.gaussian),
    Family("rademacher", 1, reference.rademacher),
    Family("hadamard", 2, reference.hadamard, Sums(reference.hadamard_total, reference.hadamard_products)),
    Family("hashed", 3, reference.hashed, Sums(reference.hashed_total, reference.hashed_products), at_end=True),
    Family("separable", 4, reference.factored, None, _tiled, core=reference.separable_core, power_of=4),
    Family("informed", 5, reference.factored, None, _of_factors, informed=True),
    Family("mixed", 6, reference.factored, None, _mixed, core=reference.transform, power_of=2, informed=True),
):
    add_family(_family)
