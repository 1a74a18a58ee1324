"""The kernel of sums of weights, beside its definition in NumPy."""

import subprocess
import sys

import numpy as np
import pytest

from fedkseed.strategies import sums
from fedkseed.strategies.sums import HEAVIEST, WeightSum

from ..strategies.test_averaging import weights_of_all_sizes


def unaligned(values: np.ndarray) -> np.ndarray:
    """The numbers as a message may have them: not for writing, and not at a multiple of their size."""
    return np.frombuffer(b"x" + values.tobytes(), np.float32, values.size, 1)


@pytest.mark.parametrize("seed", range(10))
def test_it_gives_the_bits_of_the_definition(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    size = int(rng.choice([0, 1, 7, 1000, sums.SOME + 3]))
    rows = weights_of_all_sizes(rng, (3, size), -149)
    rows[0, :2], rows[1, :2] = 2.0**24, -(2.0**24)  # the bounds
    rows[2] = np.rint(rows[2] * 2.0**14) / 2.0**14 + 2.0**-15  # halfway between two whole h, where bits are left
    found = []
    for many in (1 << 60, 0):
        monkeypatch.setattr(sums, "MANY", many)
        total = WeightSum.zeros(size)
        for client, row in enumerate(rows):
            total.add_(client, (1, HEAVIEST // 2, 77)[client], unaligned(row) if client else row)
        found.append((total.coarse, total.fine, total.weight, total.mean()))
    for definition, kernel in zip(*found, strict=True):
        np.testing.assert_array_equal(definition, kernel)


def test_it_needs_no_pytorch():
    program = "import sys, fedkseed.directions.numba_cpu.averages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
