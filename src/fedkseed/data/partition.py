"""Division of examples among clients."""

from collections.abc import Sequence

import numpy as np

from ..errors import FedKSeedError

TRIES = 1000


def dirichlet(
    labels: Sequence[str], clients: int, alpha: float, least: int, generator: np.random.Generator
) -> list[list[int]]:
    """Split examples so that each label's shares over the clients are Dirichlet(α) distributed.

    Small α (0.5 in the paper): few kinds of task a client; large α: similar clients. A client that already
    holds its even share gets no more; the draw is repeated until every client has `least` examples.

    Returns:
        For each client the indices of its examples, ascending.

    Raises:
        FedKSeedError: α ≤ 0, more clients than examples, or no draw gives every client enough.

    Source: Qin et al., 2024, Appendix C; the balancing rule is that of Li et al., 2022
    """
    _require(len(labels), clients, least)
    if not alpha > 0:
        raise FedKSeedError(f"alpha must be greater than 0, got {alpha}; 0.5 is strongly uneven, 5.0 nearly even")
    groups = [np.flatnonzero(np.asarray(labels) == label) for label in sorted(set(labels))]
    for _ in range(TRIES):
        shares: list[list[int]] = [[] for _ in range(clients)]
        for group in groups:
            p = generator.dirichlet(np.full(clients, alpha))
            p *= [len(share) < len(labels) / clients for share in shares]
            if not p.sum() > 0:
                p[:] = 1
            cuts = (np.cumsum(p / p.sum())[:-1] * len(group)).astype(int)
            for share, part in zip(shares, np.split(generator.permutation(group), cuts), strict=True):
                share.extend(part.tolist())
        if min(map(len, shares)) >= least:
            return [sorted(share) for share in shares]
    raise FedKSeedError(
        f"{TRIES} draws gave some client fewer than {least} of {len(labels)} examples; "
        "use fewer clients, a larger alpha or a smaller min_examples"
    )


def even(count: int, clients: int, least: int, generator: np.random.Generator) -> list[list[int]]:
    """Split `count` examples into equal random parts (IID)."""
    _require(count, clients, least)
    return [sorted(part.tolist()) for part in np.array_split(generator.permutation(count), clients)]


def _require(examples: int, clients: int, least: int) -> None:
    if examples < clients * max(least, 1):
        raise FedKSeedError(
            f"{clients} clients with at least {max(least, 1)} examples each need {clients * max(least, 1)}, "
            f"got {examples}; use fewer clients or more data"
        )
