"""The weighted sum of clients' weights in integers, one pass over them.

It imports no PyTorch: a server that averages has none.
"""

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from .kept_kernels import kept, one_at_a_time

SUMS, WEIGHTS = types.Array(types.int64, 1, "C"), types.Array(types.float32, 1, "C", readonly=True)

with one_at_a_time():

    @kept(
        njit,
        types.void(SUMS, SUMS, WEIGHTS, types.int64, types.float64, types.float64),
        nogil=True,
        error_model="numpy",
    )
    def add_weights(
        coarse: NDArray[np.int64], fine: NDArray[np.int64], values: NDArray[np.float32], weight: int, a: float, b: float
    ) -> None:
        """Add w h and w l of v = h / a + l / (a b), with whole h and l; a and b are powers of 2."""
        for i in range(values.size):
            scaled = np.float64(values[i]) * a
            whole = np.rint(scaled)
            coarse[i] += weight * np.int64(whole)
            fine[i] += weight * np.int64(np.rint((scaled - whole) * b))
