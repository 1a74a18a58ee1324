"""The families of directions: what each is called, its number on the wire, and its definition.

A new family is a function of `reference.py`, a record here, and kernels in those backends that are to be fast with it.
Without kernels it is made by its definition, slowly. A program adds one of its own by `add_family`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import FedKSeedError
from . import reference


@dataclass(frozen=True, slots=True)
class Family:
    """One way to make directions.

    Args:
        name: as recipes and adapters write it.
        number: as the wire writes it, 0 to 255. It never changes.
        elements: (pool, direction j, tensor, start, stop) to z_j at positions start ≤ p < stop, float32: a function
            of the pool's key and these numbers alone, wherever a tensor is cut. Its random bits come from
            `reference.philox` or `reference.signs` with streams of its own; a program's family takes them from 256 on.
        transform: of a family whose sum over all directions is one Walsh–Hadamard transform; its K is a power of two.

    Raises:
        FedKSeedError: the name or the number can't be one.
    """

    name: str
    number: int
    elements: Callable[..., reference.Floats]
    transform: reference.Transform | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise FedKSeedError(f"a family's name is a word of letters, digits and _, got {self.name!r}")
        if not 0 <= self.number <= 255:
            raise FedKSeedError(f"a family's number on the wire is 0 to 255, got {self.number}")

    @property
    def transformed(self) -> bool:
        return self.transform is not None


FAMILIES: dict[str, Family] = {}  # by name


def add_family(family: Family) -> Family:
    """Make a family known to this process: to pools, recipes, adapters and the wire.

    Every party of a run has to add the same one.

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
    """The family of a name.

    Raises:
        FedKSeedError: there is none.
    """
    if name not in FAMILIES:
        raise FedKSeedError(f"no family of directions is called {name!r}; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def numbered(number: int) -> Family:
    """The family of a number on the wire.

    Raises:
        FedKSeedError: there is none.
    """
    for family in FAMILIES.values():
        if family.number == number:
            return family
    known = ", ".join(f"{family.number} {family.name}" for family in FAMILIES.values())
    raise FedKSeedError(f"the message names direction family number {number}; this program knows {known}")


add_family(Family("gaussian", 0, reference.gaussian))
add_family(Family("rademacher", 1, reference.rademacher))
add_family(
    Family(
        "hadamard",
        2,
        reference.hadamard,
        reference.Transform(reference.hadamard_total, reference.hadamard_products),
    )
)
add_family(
    Family(
        "hashed",
        3,
        reference.hashed,
        reference.Transform(reference.hashed_total, reference.hashed_products, at_end=True),
    )
)
