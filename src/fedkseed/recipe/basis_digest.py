"""The basis of a recipe's directions: read once, and its digest written into the recipe."""

from pathlib import Path

from ..directions.factors import Basis
from ..errors import FedKSeedError
from ..weights.basis_file import load_basis
from .schema import Recipe


def with_basis(recipe: Recipe) -> tuple[Recipe, Basis | None]:
    """The recipe with its basis' digest, and the basis, which must have the digest that the recipe says.

    A recipe that names no file is returned as it is, without a basis: a party that adds up K numbers needs no more.
    """
    directions = recipe.directions
    if directions.basis is None:
        return recipe, None
    basis = load_basis(Path(directions.basis).expanduser())
    if directions.basis_digest not in (None, digest := basis.digest().hex()):
        raise FedKSeedError(
            f"[directions] basis_digest is {directions.basis_digest}, the basis {directions.basis} has {digest}: get "
            "the run's file"
        )
    return recipe.having(directions={"basis_digest": digest}), basis
