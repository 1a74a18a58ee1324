"""A family of directions of your own: sparse signs, +2 or −2 at a quarter of the positions, 0 elsewhere.

Every process of every party imports this file before it makes or reads anything of the family. Then
`Pool(key, size, "sparse")`, `family = "sparse"` in a recipe, messages and adapters work. Nothing else is needed for it
to be right: the directions are made by this function, slowly, until a backend has kernels for them.
"""

import numpy as np
from numpy.typing import NDArray

from fedkseed.directions import Family, Pool, add_family, reference

STREAM = 256  # of random bits; those below are fedkseed's


def sparse(pool: Pool, direction: int, tensor: int, start: int, stop: int) -> NDArray[np.float32]:
    """z_j at positions start ≤ p < stop of one tensor: mean 0, variance 1."""
    positions = np.arange(start, stop, dtype=np.int64)
    sign, one, other = (reference.signs(pool, STREAM + k, tensor, direction, positions) for k in range(3))
    return np.where((one > 0) & (other > 0), np.float32(2) * sign, np.float32(0))


SPARSE = add_family(Family("sparse", 200, sparse))  # its number on the wire; the same for all parties, for good
