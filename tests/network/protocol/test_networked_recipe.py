"""The defaults over a network, where members may be hostile: docs/security.md names them."""

import pytest

from fedkseed.network.protocol.networked_recipe import with_network_defaults
from fedkseed.recipe.reading import parse
from fedkseed.recipe.schema import Recipe, TrustTable

DEFENDED = TrustTable(rule="clipped", agreement=True, most_examples=1)


def recipe(training: dict, trust: dict | None = None) -> Recipe:
    return parse({"model": {"name": "none"}, "clients": {"split": "files"}, "training": training, "trust": trust or {}})


@pytest.mark.parametrize("algorithm", ["fedkseed", "fedkseed-pro", "fedkseed-plus", "fedkseed-backprop"])
def test_a_server_defends_itself_and_its_clients_where_a_recipe_says_nothing(algorithm):
    """The attacks: a claim of 2^32 − 1 examples, 1e6 times the gradient, and batches of 1, all by default before."""
    made = with_network_defaults(recipe({"algorithm": algorithm}))
    assert (made.trust, made.training.clip, made.training.batch_size) == (DEFENDED, 1000.0, 4)
    alone = recipe({"algorithm": algorithm})
    assert (alone.trust, alone.training.clip, alone.training.batch_size) == (TrustTable(), None, 1), "`fedkseed run`"


def test_what_a_recipe_names_is_not_replaced():
    named = {"rule": "mean", "agreement": False, "most_examples": 7}
    made = with_network_defaults(recipe({"batch_size": 1, "clip": 5.0}, named))
    assert (made.trust, made.training.clip, made.training.batch_size) == (TrustTable(**named), 5.0, 1)


def test_a_default_is_given_to_those_who_can_follow_it_alone():
    assert with_network_defaults(recipe({"wire": "sign", "lr": 1e-6})).training.clip is None, "a sign is 1"
    weights = with_network_defaults(recipe({"algorithm": "fedavg"}))
    assert (weights.trust, weights.training.clip, weights.training.batch_size) == (TrustTable(), None, 4)
