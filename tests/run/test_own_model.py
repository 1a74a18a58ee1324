"""A model, a loss and data of a user's own, without a recipe: it learns, and what is left is an ordinary module."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedkseed as fk


def made(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 2))


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def batches(clients: int = 4, each: int = 3, seed: int = 0):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(clients):
        x = rng.normal(size=(each, 16, 8)).astype(np.float32)
        found.append([(torch.from_numpy(part), torch.from_numpy((part.sum(1) > 0).astype(np.int64))) for part in x])
    return found


def mean(model) -> float:
    with torch.no_grad():
        return float(np.mean([float(loss(model, batch)) for own in batches(seed=1) for batch in own]))


STEPS = {
    "two points": fk.LocalWork(rounds=15, steps=20, lr=1e-2, eps=1e-3),
    "adam": fk.LocalWork(rounds=5, steps_of="adam", steps=4, lr=2e-4),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("mode", ["auto", "materialized", "in place"])
def test_it_learns_and_leaves_an_ordinary_module_that_the_adapter_makes_again(steps, mode, tmp_path):
    model, base = made().train(), made()
    tuned = fk.tune(model, loss, batches(), STEPS[steps], mode=mode)
    assert mean(model) < mean(base) - 0.1
    assert len(tuned.reports) == STEPS[steps].rounds
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert model.training
    tuned.adapter.save(tmp_path / "adapter.safetensors")
    fk.apply(base, tmp_path / "adapter.safetensors")
    for one, other in zip(model.parameters(), base.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_is_the_loop_that_the_readme_shows():
    whole = fk.tune(made(), loss, batches(), STEPS["two points"], size=2, seed=5)
    parties = fk.Parties(made(), loss, batches(), STEPS["two points"], seed=5)
    state = parties.strategy.init()
    for number in range(STEPS["two points"].rounds):
        state, _ = fk.run_round(parties.strategy, state, parties.cohort(number, 2), parties.transport)
    np.testing.assert_array_equal(state.coefficients, whole.state.coefficients)
    assert parties.finish(state).tuned == whole.adapter.tuned


def test_dropout_is_off_while_two_losses_are_compared():
    one, other = (fk.tune(made(dropout), loss, batches(), STEPS["two points"]).adapter.tuned for dropout in (0.0, 0.9))
    assert one == other


def test_a_refusal_or_an_error_of_the_loss_leaves_the_model_as_it_was():
    model, calls = made(), iter(range(100))
    before = [parameter.clone() for parameter in model.parameters()]

    def broken(model, batch):
        if next(calls) == 50:
            raise RuntimeError("mine")
        return loss(model, batch)

    with pytest.raises(RuntimeError, match="mine"):
        fk.tune(model, broken, batches(), STEPS["two points"])
    with pytest.raises(fk.FedKSeedError, match=r"every client needs a batch, got \[3, 0\]"):
        fk.tune(model, loss, [batches()[0], []], STEPS["two points"])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
