"""Every random draw of a run, as a pure function of (seed, purpose, round, client).

No generator is shared or stored: a client that comes back, a resumed run and another machine draw
the same numbers.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

EVERYONE = (1 << 32) - 1  # in place of a client's number: draws that all clients of a round share


class Purpose(IntEnum):
    """The purpose of a random draw: each purpose has random numbers of its own."""

    KEY = 1
    PARTITION = 2
    HOLDOUT = 3
    COHORT = 4
    BATCHES = 5
    DIRECTIONS = 6
    EVALUATION = 7  # label: none, or a hash of the further set's name
    SUBSAMPLE = 8  # label: a hash of the task's name
    ROUND = 9
    TUNE = 10
    BACKPROPAGATING = 11
    SPEED = 12
    BASIS = 13
    KEPT_BACK = 14  # label: the client
    SIGNS = 15
    NEIGHBOURS = 16
    KEYS = 17
    ROUNDING = 18
    NOISE = 19
    GOSSIP = 20  # labels: the peer, a count


def generator(seed: int, purpose: Purpose, *labels: int) -> np.random.Generator:
    """The random generator of (seed, purpose, labels…); every other combination has another one."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, int(purpose), *labels])))


def pool_key(seed: int) -> int:
    """The 64-bit key of a run's directions."""
    return int(generator(seed, Purpose.KEY).integers(0, 1 << 64, dtype=np.uint64))


def draw_directions(
    key: int, round_: int, client: int, steps: int, size: int, probabilities: NDArray[np.float32] | None
) -> NDArray[np.uint32]:
    """The τ directions of one client in one round, drawn with replacement, shape (τ,)."""
    u = generator(key, Purpose.DIRECTIONS, round_, client).random(steps)
    if probabilities is None:
        return np.minimum(u * size, size - 1).astype(np.uint32)
    cumulative = np.cumsum(probabilities, dtype=np.float64)
    return np.minimum(np.searchsorted(cumulative, u * cumulative[-1], side="right"), size - 1).astype(np.uint32)


def share_of(seed: int, clients: int, share: float) -> frozenset[int]:
    """The clients that can backpropagate: `share` of all, rounded, but at least one unless `share` is 0."""
    if share == 0:
        return frozenset()
    count = max(1, round(share * clients))
    return frozenset(generator(seed, Purpose.BACKPROPAGATING).permutation(clients)[:count].tolist())
