from collections import Counter

import numpy as np
import pytest

from fedkseed import FedKSeedError
from fedkseed.data.split import dirichlet, even
from fedkseed.randomness import Purpose, generator

LABELS = ["a"] * 300 + ["b"] * 500 + ["c"] * 200


def rng():
    return generator(0, Purpose.PARTITION)


@pytest.mark.parametrize(("alpha", "least"), [(0.1, 1), (0.5, 5), (5.0, 20)])
def test_every_example_goes_to_one_client_and_everyone_has_enough(alpha, least):
    parts = dirichlet(LABELS, 10, alpha, least, rng())
    assert sorted(i for part in parts for i in part) == list(range(1000))
    assert min(map(len, parts)) >= least


def test_a_small_alpha_gives_uneven_mixtures():
    def largest_share(alpha: float) -> float:
        parts = dirichlet(LABELS, 10, alpha, 1, rng())
        return float(np.mean([max(Counter(LABELS[i] for i in part).values()) / len(part) for part in parts]))

    assert largest_share(0.1) > largest_share(100.0) + 0.2


def test_an_even_split_differs_by_one_at_most():
    sizes = [len(part) for part in even(1003, 20, 1, rng())]
    assert sum(sizes) == 1003
    assert max(sizes) - min(sizes) == 1


def test_the_same_seed_gives_the_same_split():
    assert dirichlet(LABELS, 20, 0.5, 1, rng()) == dirichlet(LABELS, 20, 0.5, 1, rng())


@pytest.mark.parametrize(
    ("clients", "alpha", "least", "message"),
    [
        (20, 0.0, 1, "alpha must be greater than 0, got 0.0"),
        (20, -1.0, 1, "alpha must be greater than 0"),
        (2000, 0.5, 1, "2000 clients with at least 1 examples each need 2000, got 1000"),
        (100, 0.05, 10, "use fewer clients, a larger alpha or a smaller min_examples"),
    ],
)
def test_splits_that_are_not_possible_are_refused(clients, alpha, least, message):
    with pytest.raises(FedKSeedError, match=message):
        dirichlet(LABELS, clients, alpha, least, rng())
