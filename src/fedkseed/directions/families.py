"""Families of directions: the name of each, its number on the wire, and its definition.

A new family is a function in `reference.py`, a record here, and kernels in those backends that should be fast with it.
Without kernels its directions are made by the definition, slowly. A program adds its own family with `add_family`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import FedKSeedError
from . import reference


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

    Raises:
        FedKSeedError: the name or the number is not allowed.
    """

    name: str
    number: int
    elements: Callable[..., reference.Floats]
    transform: reference.TransformDefinition | None = None
    factored: reference.FactoredDefinition | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise FedKSeedError(f"a family's name is a word of letters, digits and _, got {self.name!r}")
        if not 0 <= self.number <= 255:
            raise FedKSeedError(f"a family's number on the wire is 0 to 255, got {self.number}")

    @property
    def transformed(self) -> bool:
        return self.transform is not None

    @property
    def informed(self) -> bool:
        """Whether a basis has the factors."""
        return self.factored is not None and self.factored.informed

    def core(self, c: reference.Floats) -> reference.Floats:
        """The numbers that the sums of a factored family are made from: C in its order, or M."""
        return c if self.factored is None else self.factored.core(c)


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


def named(name: str) -> Family:
    """The family with the given name.

    Raises:
        FedKSeedError: no family has this name.
    """
    if name not in FAMILIES:
        raise FedKSeedError(f"no family of directions is called {name!r}; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


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


add_family(Family("gaussian", 0, reference.gaussian))
add_family(Family("rademacher", 1, reference.rademacher))
add_family(
    Family(
        "hadamard",
        2,
        reference.hadamard,
        reference.TransformDefinition(reference.hadamard_total, reference.hadamard_products),
    )
)
add_family(
    Family(
        "hashed",
        3,
        reference.hashed,
        reference.TransformDefinition(reference.hashed_total, reference.hashed_products, at_end=True),
    )
)
add_family(
    Family(
        "separable",
        4,
        reference.factored,
        factored=reference.FactoredDefinition(
            reference.require_square, reference.separable_core, reference.separable_total, reference.separable_project
        ),
    )
)
add_family(
    Family(
        "informed",
        5,
        reference.factored,
        factored=reference.FactoredDefinition(
            lambda size: None, lambda c: c, reference.informed_total, reference.informed_project, informed=True
        ),
    )
)
add_family(
    Family(
        "mixed",
        6,
        reference.factored,
        factored=reference.FactoredDefinition(
            reference.require_power,
            reference.transform,
            reference.informed_total,
            reference.mixed_project,
            informed=True,
        ),
    )
)
