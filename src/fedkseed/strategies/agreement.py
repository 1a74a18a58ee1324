"""Evidence about clients: whether the gradient that one reports agrees with what others found.

To first order, Σ_j q_j h_j is how much an upload q lowers the loss, where h_j is the mean of what others found along
direction j, in this round and, with less weight, before. Over the root of Σ_j (q_j h_j)^2 it is z, about normal with
variance 1: around some μ > 0 for an honest client, around 0 for noise, below 0 for one that works against the others.
The others are looked at in parts, and the parts with the highest and the lowest z are left out, because a hostile
client agrees most with another one that tells the same lie. The z of a client's rounds are added up, weighted by the
roots of their numbers of directions. Then a client counts by the odds that it is honest and its upload no noise,

    (1 − p) / p · exp(μ z − μ^2 / 2)    p: share of hostile clients, μ: median z of a round, WEAKEST to STRONGEST

A few that agree on a lie could have the others left out. Therefore nobody counts for more than the median, and where
more clients than may be hostile would count for half of it or less, all count alike, as they do while there is no
evidence. Where half of the clients agree on a lie, honest ones are left out: no rule that sees nothing but uploads can
know which half is right. docs/security.md has measurements.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from .sums import Contribution

State = TypeVar("State", bound=Any)  # a dataclass

WHOLE = 16  # weight of a client that is believed fully
# Bounds of μ. The lower one is about what honest clients reach after some rounds: it lets evidence count before that.
# With the upper one, clients whose data are of their own kind, and agree less, count in full from z = 2 on.
WEAKEST, STRONGEST = 2.0, 3.0
LOUDEST = 3  # times the median: honest numbers are about normal, and 96 % of them lie below
FADE = 3  # each round the memory of directions loses one part in 2^FADE: gradients change as the model does
FORGET = 15 / 16  # of a client's evidence, in each of its rounds: an honest client may turn hostile
ONE = 1 << 16  # what one draw adds to `draws`
# Memory is kept in parts, by client number modulo GROUPS, and nobody is compared with its own part's: one that always
# says the same (the same number along every direction, say) would else agree with itself more and more. Two of ten
# that say it together are in one part of eight each.
GROUPS = 8


def weighed(state: State, contributions: Sequence[Contribution], hostile: float) -> tuple[list[int], State]:
    """The weight of each contribution of a round, 0 to WHOLE, and the state with the evidence after the round.

    Args:
        state: with the memory of a run's rounds:
            gradients: (GROUPS, K), sum of the gradients found along each direction, of GRID, faded.
            draws: (GROUPS, K), how often it was drawn, in units of 1 / ONE, faded alike.
            clients: (n,), those that took part so far, ascending.
            agreement: (n,), Σ √m z of each, m: number of directions that z was found on.
            directions: (n,), Σ m.
        contributions: with norms cut to a common bound, in the order of their clients.
        hostile: p, share of the clients that may be hostile.

    Raises:
        FedKSeedError: the evidence was gathered by a version that keeps another number of parts.
    """
    if len(state.gradients) != GROUPS:
        raise FedKSeedError(
            f"this run's evidence about clients has {len(state.gradients)} parts, this program keeps {GROUPS}: "
            "the run was begun with another version; go on with that one, or start a new run"
        )
    sizes = np.abs(np.concatenate([each.values for each in contributions]))
    most = int(LOUDEST * np.median(sizes[sizes > 0])) if sizes.any() else 0  # a few large numbers must not decide
    rows = [  # part, directions, numbers and draws; a number that was computed counts as one draw
        (each.client % GROUPS, each.directions, np.clip(each.values, -most, most), np.maximum(each.counts, 1) * ONE)
        for each in contributions
    ]
    gradients, draws = np.zeros_like(state.gradients), np.zeros_like(state.draws)  # of this round
    for part, j, values, drawn in rows:
        gradients[part, j] += values
        draws[part, j] += drawn
    records = {int(k): (a, m) for k, a, m in zip(state.clients, state.agreement, state.directions, strict=True)}
    # One client of five has no accomplice, two of ten have one each.
    met = records.keys() | {each.client for each in contributions}
    accomplices = max(math.ceil(hostile * len(met) - 1e-9) - 1, 0)
    for each, (part, j, values, drawn) in zip(contributions, rows, strict=True):
        sums, times = state.gradients[:, j] + gradients[:, j], state.draws[:, j] + draws[:, j]
        sums[part], times[part] = gradients[part, j] - values, draws[part, j] - drawn
        z, count = _agreement(values, sums, times, accomplices)
        agreement, counted = records.get(each.client, (0.0, 0.0))
        records[each.client] = FORGET * agreement + math.sqrt(count) * z, FORGET**2 * counted + count
    weights = _weights([records[each.client] for each in contributions], hostile)
    gradients, draws = state.gradients - (state.gradients >> FADE), state.draws - (state.draws >> FADE)
    for weight, (part, j, values, drawn) in zip(weights, rows, strict=True):
        gradients[part, j] += weight * values // WHOLE
        draws[part, j] += weight * drawn // WHOLE
    clients = np.array(sorted(records), np.uint32)
    agreement, directions = np.array([records[client] for client in sorted(records)], np.float64).T.copy()
    kept = {"gradients": gradients, "draws": draws, "clients": clients, "agreement": agreement}
    return weights, replace(state, **kept, directions=directions)


def _weights(records: Sequence[tuple[float, float]], hostile: float) -> list[int]:
    """The weight of each client of a round, 0 to WHOLE, from its Σ √m z and Σ m."""
    scores = [agreement / math.sqrt(directions or 1.0) for agreement, directions in records]
    usual = min(max(WEAKEST, median(scores)), STRONGEST)
    prior = math.log((1 - hostile) / max(hostile, 1e-9))
    odds = [prior + usual * score - usual * usual / 2 for score in scores]  # of the probability that each is honest
    weights = [round(WHOLE / (1 + math.exp(-each))) if each > -700 else 0 for each in odds]
    typical, few = math.floor(median(weights)), math.ceil(hostile * len(weights) - 1e-9)
    weights = [min(weight, typical) for weight in weights]
    if sum(2 * weight <= typical for weight in weights) > few:  # those who are left out may be the honest
        return [WHOLE] * len(weights)
    return weights


def _agreement(
    values: NDArray[np.int64], sums: NDArray[np.int64], draws: NDArray[np.int64], accomplices: int
) -> tuple[float, int]:
    """z of a client's numbers q with the mean h of what the others found, cut to ±STRONGEST, and the count of products.

    Left out are the parts with the highest z of their own, and as many with the lowest.

    Args:
        sums: (GROUPS, m), what each part found along the directions, summed.
        draws: of the same shape, how often.
        accomplices: the most parts that may hold what a client agrees on with others; the number to leave out.
    """
    if accomplices:
        order = sorted((_z(values, *row)[0], k) for k, row in enumerate(zip(sums, draws, strict=True)) if row[1].any())
        out = min(accomplices, (len(order) - 1) // 2)
        kept = [k for _, k in order[out : len(order) - out]]
        sums, draws = sums[kept], draws[kept]
    z, count = _z(values, sums.sum(0), draws.sum(0))
    return min(max(z, -STRONGEST), STRONGEST), count


def _z(values: NDArray[np.int64], sums: NDArray[np.int64], draws: NDArray[np.int64]) -> tuple[float, int]:
    """Σ q h / √Σ (q h)^2 over the directions that were drawn, and their number.

    Sums are rounded once (`fsum`), so that all machines find the same.
    """
    products = values[draws > 0] * (sums[draws > 0] / draws[draws > 0])
    spread = math.fsum(np.square(products).tolist())
    return (math.fsum(products.tolist()) / math.sqrt(spread), products.size) if spread > 0 else (0.0, 0)
