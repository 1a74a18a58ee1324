"""Rules by which a server adds up uploads of which a few may be hostile: `[trust] rule`.

    mean               Σ w q / Σ w: one client can move it anywhere
    clipped            the same, of uploads that were cut
    centered clipping  the mean of what is left of each upload after cutting its distance to that mean (3 times)
    trimmed            in each direction, the mean without the f largest and the f smallest numbers
    median             in each direction, the middle number
    nnm-trimmed        trimmed, with each upload replaced by the mean of its n − f nearest ones

All but the mean are of uploads that were cut: norms to their median, weights to twice theirs (`cut`). f is the number
of clients that may be hostile. The last four count all clients alike. Where clients send scalars along
directions of their own, most directions have one number that is not 0, and trimmed, median and nnm-trimmed leave
nothing of an honest upload: they are for uploads of K numbers. docs/security.md has what each rule keeps under attack.

Sources: Yin et al., 2018, https://arxiv.org/abs/1803.01498 (trimmed, median); Karimireddy et al., 2021,
https://arxiv.org/abs/2012.10333 (centered clipping); Allouah et al., 2023, https://arxiv.org/abs/2302.01772 (nnm)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .sums import Contribution, Sum, summed

TIMES = 3  # of centered clipping
EXACT = 51  # bits of a sum of squares that float64 holds exactly, whatever the order, with two to spare


def sum_of(rule: str, contributions: Sequence[Contribution], size: int, hostile: float) -> Sum:
    """The sum of a round's contributions, in the order of their clients, for K = `size` directions.

    Args:
        hostile: share of the clients that may be hostile; f is that of n clients, rounded up, less than a half.
    """
    few = min(math.ceil(hostile * len(contributions) - 1e-9), (len(contributions) - 1) // 2)
    return RULES[rule](contributions, size, few)


def norm(numbers: NDArray[np.int64]) -> float:
    """The Euclidean norm; `fsum` rounds once, so its value depends neither on the order nor on the machine."""
    return math.sqrt(math.fsum(np.square(numbers.astype(np.float64)).tolist()))


def cut(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Contributions with norms and Σ |ρ| of at most their medians, and weights of at most twice the median weight.

    Those that say nothing, of zeros or of probes that moved nothing, are left out: with their weights they would only
    make the step of the others smaller.
    """
    contributions = [one for one in contributions if one.values.any()] or contributions
    norms = [norm(one.values) for one in contributions]
    longest, heaviest = median(norms), math.floor(2 * median(one.weight for one in contributions))
    loudest = median(int(one.sizes.sum()) for one in contributions)  # numbers that cancel have no norm, but sizes
    return [
        (one.scaled(longest / length) if length > longest else one)
        .with_sizes_of(loudest)
        .weighing(min(one.weight, heaviest))
        for one, length in zip(contributions, norms, strict=True)
    ]


def _mean(contributions: Sequence[Contribution], size: int, few: int) -> Sum:
    return summed(contributions, size)


def _centered(contributions: Sequence[Contribution], size: int, few: int) -> Sum:
    rows, center = _dense(contributions, size), np.zeros(size, np.int64)
    for _ in range(TIMES):
        away = rows - center
        norms = [norm(row) for row in away]
        longest = median(norms)
        kept = [
            np.rint(row * (longest / length)).astype(np.int64) if length > longest else row
            for row, length in zip(away, norms, strict=True)
        ]
        center = center + np.rint(np.sum(kept, axis=0) / len(rows)).astype(np.int64)
    return Sum(center, 1)


def _trimmed(contributions: Sequence[Contribution], size: int, few: int) -> Sum:
    return _trim(_dense(contributions, size), few)


def _median(contributions: Sequence[Contribution], size: int, few: int) -> Sum:
    return _trim(_dense(contributions, size), (len(contributions) - 1) // 2)


def _nearest_trimmed(contributions: Sequence[Contribution], size: int, few: int) -> Sum:
    rows = _dense(contributions, size)
    near = len(rows) - few
    neighbours = np.argsort(_distances(rows), axis=1, kind="stable")[:, :near]
    found = _trim(np.array([rows[of].sum(0) for of in neighbours]), few)
    return Sum(found.values, found.weight * near)


def _dense(contributions: Sequence[Contribution], size: int) -> NDArray[np.int64]:
    rows = np.zeros((len(contributions), size), np.int64)
    for row, one in zip(rows, contributions, strict=True):
        row[one.directions] = one.values
    return rows


def _trim(rows: NDArray[np.int64], few: int) -> Sum:
    return Sum(np.sort(rows, axis=0)[few : len(rows) - few].sum(0), len(rows) - 2 * few)


def _distances(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Squared distances of all pairs, shape (n, n), of numbers cut to so few bits that no sum is rounded."""
    bits = (EXACT - math.ceil(math.log2(rows.shape[1]))) // 2
    few = (rows >> max(0, int(np.abs(rows).max(initial=0)).bit_length() - bits)).astype(np.float64)
    products = few @ few.T
    squares = np.diag(products)
    return squares[:, None] + squares - 2 * products


Rule = Callable[[Sequence[Contribution], int, int], Sum]
RULES: Mapping[str, Rule] = {
    "mean": _mean,
    "clipped": _mean,
    "centered clipping": _centered,
    "trimmed": _trimmed,
    "median": _median,
    "nnm-trimmed": _nearest_trimmed,
}
