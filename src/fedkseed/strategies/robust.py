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
from dataclasses import replace
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .sums import Contribution, Sum

ClientRows: TypeAlias = NDArray[np.int64]  # (n, K): the numbers of each client

TIMES = 3  # that centered clipping cuts distances
EXACT = 51  # bits of a sum of squares that float64 holds exactly, whatever the order, with two to spare


def sum_of(rule: str, contributions: Sequence[Contribution], size: int, hostile: float) -> Sum:
    """The sum of a round's contributions, in the order of their clients, for K = `size` directions.

    Args:
        hostile: share of the clients that may be hostile; f is that of n clients, rounded up, less than a half.
    """
    total, values_of = Sum.of(contributions, size), RULES[rule]
    if values_of is None or not contributions:
        return total
    few = min(math.ceil(hostile * len(contributions) - 1e-9), (len(contributions) - 1) // 2)
    rows = np.zeros((len(contributions), size), np.int64)
    for row, each in zip(rows, contributions, strict=True):
        row[each.directions] = each.values
    total.values, total.weight = values_of(rows, few)
    return total


def norm(numbers: NDArray[np.int64]) -> float:
    """The Euclidean norm; `fsum` rounds once, so its value depends neither on the order nor on the machine."""
    return math.sqrt(math.fsum(np.square(numbers.astype(np.float64)).tolist()))


def cut(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Contributions with norms and Σ |ρ| of at most their medians, and weights of at most twice the median weight.

    Those that say nothing, of zeros or of probes that moved nothing, are left out: with their weights they would only
    make the step of the others smaller.
    """
    contributions = [each for each in contributions if each.values.any()] or contributions
    norms = [norm(each.values) for each in contributions]
    longest, heaviest = median(norms), math.floor(2 * median(each.weight for each in contributions))
    loudest = median(int(each.sizes.sum()) for each in contributions)  # numbers that cancel have no norm, but sizes
    after = []
    for each, length in zip(contributions, norms, strict=True):
        values, sizes = each.values, each.sizes
        if length > longest:
            values, sizes = _scaled(values, longest / length), _scaled(sizes, longest / length)
        if (total := int(sizes.sum())) > loudest:
            sizes = _scaled(sizes, loudest / total)
        after.append(replace(each, weight=min(each.weight, heaviest), values=values, sizes=sizes))
    return after


def _scaled(numbers: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """Smaller numbers, rounded to the nearest, half to even."""
    return np.rint(numbers * factor).astype(np.int64)


def _centered(rows: ClientRows, few: int) -> tuple[NDArray[np.int64], int]:
    center = np.zeros(rows.shape[1], np.int64)
    for _ in range(TIMES):
        away = rows - center
        norms = [norm(row) for row in away]
        longest = median(norms)
        pairs = zip(away, norms, strict=True)
        kept = [_scaled(row, longest / length) if length > longest else row for row, length in pairs]
        center = center + np.rint(np.sum(kept, axis=0) / len(rows)).astype(np.int64)
    return center, 1


def _trimmed(rows: ClientRows, few: int) -> tuple[NDArray[np.int64], int]:
    return np.sort(rows, axis=0)[few : len(rows) - few].sum(0), len(rows) - 2 * few


def _nearest_trimmed(rows: ClientRows, few: int) -> tuple[NDArray[np.int64], int]:
    """Trimmed means of the nearest rows, by squared distances of numbers cut to so few bits that no sum is rounded."""
    bits, near = (EXACT - math.ceil(math.log2(rows.shape[1]))) // 2, len(rows) - few
    coarse = (rows >> max(0, int(np.abs(rows).max(initial=0)).bit_length() - bits)).astype(np.float64)
    products = coarse @ coarse.T
    squares = np.diag(products)
    nearest = np.argsort(squares[:, None] + squares - 2 * products, axis=1, kind="stable")[:, :near]
    values, weight = _trimmed(np.array([rows[places].sum(0) for places in nearest]), few)
    return values, weight * near


def memory_of(rule: str, agreement: bool, clients: int, numbers: int, size: int, scalars: bool) -> int:
    """Bytes that a round's uploads take at the most where they are compared; measured, within a tenth.

    Args:
        numbers: directions that one upload speaks of, of K = `size`.
        scalars: whether uploads are scalars, which have sizes and counts, or changes.
    """
    of_upload, tables = (44 if scalars else 30) * numbers, 8 * size * TABLES[rule]
    evidence = of_upload if agreement else 0  # which is gathered before the rule has its arrays
    return clients * (of_upload + max(evidence, tables)) if rule != "mean" or agreement else 0


# Rows of numbers, one a client, and f -> the numbers and their weight in place of the weighted sum; None: that sum.
Rule: TypeAlias = Callable[[ClientRows, int], tuple[NDArray[np.int64], int]]
RULES: Mapping[str, Rule | None] = {
    "mean": None,
    "clipped": None,
    "centered clipping": _centered,
    "trimmed": _trimmed,
    "median": lambda rows, few: _trimmed(rows, (len(rows) - 1) // 2),
    "nnm-trimmed": _nearest_trimmed,
}
# Arrays of (n, K) that a rule has at one time, see `memory_of`.
TABLES = {"mean": 0, "clipped": 0, "centered clipping": 4, "trimmed": 2, "median": 2, "nnm-trimmed": 4}
