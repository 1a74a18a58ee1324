"""The defaults over a network, where members may be hostile: docs/security.md names them."""

from tomllib import loads

import numpy as np
import pytest

from fedkseed import FedKSeedError, Pool, encode
from fedkseed.network.protocol.carrier import MAX_MESSAGE
from fedkseed.network.protocol.networked_recipe import largest_request, with_network_defaults
from fedkseed.network.protocol.server.serving import begin
from fedkseed.recipe.reading import parse
from fedkseed.recipe.schema import Recipe, TrustTable
from fedkseed.wire.records import Run, Upload

DEFENDED = TrustTable(rule="clipped", agreement=True, most_examples=1, warmup=3)


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


def test_first_steps_are_shorter_where_agreement_gathers_evidence_in_the_meantime():
    trusts = [{}, {"agreement": True}, {"agreement": False}, {"rule": "mean"}, {"agreement": True, "warmup": 1}]
    assert [with_network_defaults(recipe({}, trust)).trust.warmup for trust in trusts] == [3, 3, 0, 3, 1]


def test_a_default_is_given_to_those_who_can_follow_it_alone():
    assert with_network_defaults(recipe({"wire": "sign", "lr": 1e-6})).training.clip is None, "a sign is 1"
    weights = with_network_defaults(recipe({"algorithm": "fedavg"}))
    assert (weights.trust, weights.training.clip, weights.training.batch_size) == (TrustTable(), None, 4)


@pytest.mark.parametrize("exact", [4096, 100_000])
def test_the_largest_request_that_is_taken_holds_the_largest_upload_and_not_much_more(setting, exact):
    """K derivatives, or a scalar for each probe, in float32."""
    size, steps = 4096, exact // 2
    wanted = parse(loads(setting.text(steps=f"steps = {steps}\nprobes = 2", size=f"size = {size}")))
    upload = Upload(Run(Pool(1, size), bytes(32)), 0, 0, 10, 1.0, np.ones(exact, np.float32))
    data = len(encode(upload))
    assert data + 4000 < largest_request(wanted) < 3 * data + (1 << 16)
    weights = wanted.model_copy(update={"training": wanted.training.model_copy(update={"algorithm": "fedavg"})})
    assert largest_request(weights) > MAX_MESSAGE


def test_a_server_refuses_at_once_what_a_network_can_not_follow(setting, tmp_path):
    (tmp_path / "r.toml").write_text(setting.text())
    with pytest.raises(FedKSeedError, match="draws from the rows of all parties, which no party sees; name a category"):
        begin(tmp_path / "r.toml", ["data.held_out=0.1"], tmp_path / "run", note=id)
    assert not (tmp_path / "run").exists()


def test_of_a_run_that_has_begun_only_how_long_is_waited_for_whom_may_change(setting, tmp_path):
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    for minimum in (3, 2):
        recipe.write_text(setting.text(f"minimum = {minimum}"))
        assert begin(recipe, (), run, note=id).network.minimum == minimum
    recipe.write_text(setting.text("minimum = 1", rounds="rounds = 7"))
    with pytest.raises(FedKSeedError, match=r"only \[network\] and \[report\] may change"):
        begin(recipe, (), run, note=id)
